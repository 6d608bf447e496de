"""Generator of `qload/architecture/model_tables.json`, from the models of one version of transformers."""
