"""Integrations with inference engines, one package each, imported by users of the engine alone."""
