"""Engines that run on qload: each in a package of its own, imported by who asks for it alone."""
