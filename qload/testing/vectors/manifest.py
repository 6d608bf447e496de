"""What `manifest.json` holds; its JSON schema follows from these classes."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION = (
    "1.0.0"  # of the vectors: a case that is changed or removed raises the first number, a new one the second
)


class VectorFile(BaseModel):
    """One file of a case."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(description="Relative to the manifest, with forward slashes.")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="In bytes.")


class VectorCase(BaseModel):
    """One checkpoint with one quantized layer, called `layer`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(description="Stable: the same case in every later version.")
    format: str
    result: Literal["valid", "must-reject", "disputed"] = Field(
        description="disputed: programs in use read it differently; `expected` is how the owner does."
    )
    flags: tuple[str, ...] = Field(description="The classes of bugs that the case is there to find.")
    comment: str
    N: int = Field(description="Outputs of the layer.")
    K: int = Field(description="Inputs of the layer.")
    split: Literal["N", "K"] | None = Field(
        default=None, description="Along which axis `world` ranks share the layer; null: it is read whole."
    )
    world: int = Field(default=1, ge=1)
    files: tuple[VectorFile, ...] = Field(description="The checkpoint: a config.json and safetensors files.")
    expected: VectorFile | None = Field(
        default=None,
        description="Where it may be read: safetensors with `weight`, float32 (N, K), the whole layer.",
    )


class Manifest(BaseModel):
    """All cases of one version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    schema_file: str = "schema.json"
    cases: tuple[VectorCase, ...]
