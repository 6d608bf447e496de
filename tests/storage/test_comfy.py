"""Files of ComfyUI with broken headers and marks; tests/formats/test_comfy.py has their values."""

from tests.storage.comfy_mutations import comfy_mutations, layers, read_layers, seeds, try_comfy


def test_mutated_files_raise_only_errors_of_qload() -> None:
    """Test a slice of the long run, `nox -s fuzz`; all layers of an unchanged file are read."""
    whole = [read_layers(len(header).to_bytes(8, "little") + header + data) for header, data in seeds()]

    assert whole == [[*layers()], [*layers()], ["a"]]
    assert {try_comfy(file) for file in comfy_mutations(100)} == {True, False}
