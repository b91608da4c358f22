# SPDX-License-Identifier: Apache-2.0
"""Weights as one file of the safetensors format, leaf by leaf: written from shards, read in slices.

The format is the length of a header (8 bytes, little-endian), the header (JSON: name, dtype, shape
and place of every array), and the arrays' bytes, little-endian and in C order
(https://github.com/huggingface/safetensors). Nothing in such a file is ever executed. Names are the
paths of the leaves with dots, as Flax models are published: `blocks.attn.q.kernel`.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather, sync_global_devices
from safetensors import SafetensorError, safe_open

import zerojax as zj
from zerojax.sharding.state import merge
from zerojax.training.initial_params import match_params
from zerojax.tree import leaves_with_names

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
DTYPES = {name: jnp.dtype(dtype) for dtype, name in NAMES.items()}


def finest_params(state: zj.TrainState) -> Any:
    """Return the parameters before rounding: of what has a master copy, the master copy."""
    return state.params if state.master is None else merge(state.params, state.master)


def write_safetensors(
    path: Path, params: Any, dtype: Any = None, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a tree of arrays as one file, with one whole leaf in host memory at a time.

    The file appears under its name when it is complete. With several processes all of them call
    this, and the first one writes. An array that the tree holds twice is written twice.

    Args:
        path: The file; one of that name is replaced.
        params: A tree of arrays of JAX (whole or in shards) or NumPy.
        dtype: What real arrays are cast to (None: their own dtype); others keep theirs.
        metadata: Texts to keep in the header.

    Raises:
        ValueError: Two leaves have one name, or a dtype that the format does not know.
        OSError: The file cannot be written.
    """
    leaves = _named(params)
    dtypes = {name: _dtype_in_file(name, x, dtype) for name, x in leaves.items()}
    # Wide dtypes first, so that every array begins at a multiple of its item's size.
    order = sorted(leaves, key=lambda name: (-dtypes[name].itemsize, name))
    arrays = {name: jax.ShapeDtypeStruct(leaves[name].shape, dtypes[name]) for name in order}
    part = path.with_name(f"{path.name}.part")
    writes = jax.process_index() == 0
    try:
        with open(part if writes else os.devnull, "wb") as file:
            file.write(_header(arrays, metadata or {}))
            for name in order:  # all processes: a gather needs each of them
                file.write(_to_host(leaves[name], dtypes[name]).reshape(-1).view(np.uint8))
            file.flush()
            if writes:
                os.fsync(file.fileno())
        if writes:
            part.replace(path)
    finally:
        if writes:
            part.unlink(missing_ok=True)
    if jax.process_count() > 1:
        sync_global_devices(f"wrote {path}")


@dataclass(frozen=True, eq=False)
class Slices:
    """One array of a file; indexing it reads that slice from the disk."""

    source: Any
    shape: tuple[int, ...]
    dtype: np.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        # The library slices nothing out of an array without elements.
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)[index]
        return self.source[index]


def read_safetensors(path: Path, abstract_params: Any) -> Any:
    """Return a tree like `abstract_params` of leaves that are read when sliced, for `init_state`.

    Args:
        path: A file with an array for every leaf, named by the leaf's path with dots.
        abstract_params: The shapes and dtypes to expect, such as `plan.abstract_state.params`; None
            in place of a leaf, or of a tree of them, is one that the file lacks.

    Raises:
        ValueError: The file is damaged, arrays are missing or unknown, or their shapes or dtypes
            are others.
        OSError: There is no such file, or it cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; give the path of a .safetensors file")
    try:
        file = safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    slices = {}
    for name in file.keys():  # noqa: SIM118 (it is no mapping)
        source = file.get_slice(name)
        if source.get_dtype() not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(
                f"{path}: {name!r} is {source.get_dtype()}; convert it to one of {known}"
            )
        slices[name] = Slices(source, tuple(source.get_shape()), DTYPES[source.get_dtype()])
    names, paths = _named(abstract_params), [path for path, _ in leaves_with_names(abstract_params)]
    path_of = dict(zip(names, paths, strict=True))
    given = {path_of.get(name, name): x for name, x in slices.items()}
    if len(given) < len(slices):
        raise ValueError(f"{path}: arrays have names that differ only in '/' and '.'; rename them")
    try:
        values = match_params(abstract_params, given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return jax.tree.unflatten(jax.tree.structure(abstract_params), values)


def read_initial(path: Path | None, plan: zj.Plan) -> Any:
    """Return what `--init-from` gives `init_state`; the error names the flags that may disagree."""
    if path is None:
        return None
    try:
        return read_safetensors(path, plan.abstract_state.params)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--init-from: {error}") from error
    except ValueError as error:
        flags = "--model, --layers, --seq and --vocab must be those of the run that made the file"
        raise ValueError(f"--init-from: {error} Here: {flags}.") from error


def _named(params: Any) -> dict[str, Any]:
    """Return the leaves by name, of a tree or of a dict from path to array."""
    leaves = {}
    for path, leaf in leaves_with_names(params):
        name = path.replace("/", ".")
        if name in leaves:
            raise ValueError(f"two leaves have the name {name!r}; rename one in the parameters")
        leaves[name] = leaf
    return leaves


def _dtype_in_file(name: str, leaf: Any, dtype: Any) -> np.dtype:
    found = leaf.dtype
    if dtype is not None and jnp.issubdtype(found, jnp.floating):
        found = jnp.dtype(dtype)
    if found.name not in NAMES:
        known = ", ".join(NAMES)
        raise ValueError(f"leaf {name!r} is {found}; the format knows {known}")
    return found


def _header(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return what precedes the arrays' bytes, padded to a multiple of 8."""
    # "flax" is what Flax models say there; readers of Hugging Face ask for it.
    first = {"format": "flax", "zerojax": zj.__version__, **metadata}
    header: dict[str, Any] = {"__metadata__": first}
    start = 0
    for name, x in arrays.items():
        end = start + x.size * x.dtype.itemsize
        header[name] = {
            "dtype": NAMES[x.dtype.name],
            "shape": x.shape,
            "data_offsets": [start, end],
        }
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _to_host(leaf: Any, dtype: np.dtype) -> np.ndarray:
    """Return one leaf, whole and in `dtype`, put together from its shards where they are here."""
    if not isinstance(leaf, jax.Array):
        return np.ascontiguousarray(leaf, dtype)
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return np.ascontiguousarray(process_allgather(leaf, tiled=True), dtype)
    whole = np.empty(leaf.shape, dtype)
    shards = {str(shard.index): shard for shard in leaf.addressable_shards}  # replicas once
    for shard in shards.values():
        # Of a copy: an array keeps what was read from it on the host as long as it lives.
        whole[shard.index] = np.asarray(jnp.copy(shard.data))
    return whole
