"""Readers of quantization configs, by `quant_method`.

A reader `read_...(source)` validates the section and returns its claims, with the formats of the loader.
`..._VARIANTS` lists the supported variants of a method for error messages.
"""
