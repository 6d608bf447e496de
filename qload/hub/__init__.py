"""Models of the Hugging Face hub, by id: the only package that uses the network.

The library huggingface_hub, imported on the first call, provides the endpoint, the token and the cache. A
string passed to `qload.inspect`, `verify` or `open_checkpoint` is always a path; a model of the hub is opened
first:

    with open_folder(HubId("org/model")) as folder:
        report = qload.inspect(folder)
"""

from qload.hub.folder import HubFolder, HubId, cached_folder, fetch, open_folder, parse_id

__all__ = ["HubFolder", "HubId", "cached_folder", "fetch", "open_folder", "parse_id"]
