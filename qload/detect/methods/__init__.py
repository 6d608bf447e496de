"""Readers of methods whose configs describe several formats; a method of one format is in its module.

`METHODS` of each module are found by `config_reader`.
"""
