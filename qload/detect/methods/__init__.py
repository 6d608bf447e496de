"""How each `quant_method` says what it stores: a file a method, alike inside.

`read(found)` validates the section and returns its claims, with the formats of the loader; `KNOWN` is how
the method is listed where another one is refused.
"""
