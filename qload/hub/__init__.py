"""Models of the Hugging Face hub, by name: the one package that uses the network, when it is called.

It asks through the library huggingface_hub, which is imported then and knows the endpoint, the token and the
cache. No string that is handed to `qload.inspect`, `verify` or `open_checkpoint` means a model of the hub:

    with open_folder(HubId("org/model")) as folder:
        report = qload.inspect(folder)
"""

from qload.hub.folder import HubFolder, HubId, cached_folder, fetch, open_folder, parse_id

__all__ = ["HubFolder", "HubId", "cached_folder", "fetch", "open_folder", "parse_id"]
