"""Text and vision-language models over typed weights, for `qload run` and `qload verify --logits`.

    model = load_model(path, device="cuda")
    cache = PagedCache.of(model.config, pages=64, dtype=torch.bfloat16, device="cuda")
    logits = model(ids, Step.of([0], tokens=len(ids), pages=[[0, 1]], page_size=16, device="cuda"), cache)

`FAMILIES`: properties of each supported model type; `GREEDY`: sampler of the most likely token.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
