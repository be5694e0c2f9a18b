"""A GGUF file as a model whose weights stay the file's blocks, laid down once beside the unpacked copy.

Of each matrix the file's blocks are taken where they stand for the very numbers of the unpacked model, row by row:
llama.cpp orders some rows otherwise than `transformers`. So nothing is known here of any family, and what cannot be
matched stays plain.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from streamh2o.errors import UserError
from streamh2o.kernels.gguf_blocks import KINDS, Blocks
from streamh2o.kernels.gguf_linear import GgufEmbedding, GgufLinear
from streamh2o.kernels.select import TORCH, Kernel
from streamh2o.models.gguf.header import GgufHeader, read_header
from streamh2o.models.gguf.unpacked import (
    building,
    cached_packed,
    read_mark,
    readable_errors,
    safetensors_folder,
    write_mark,
)

FILE = "packed.safetensors"
Tell = Callable[[str], None]


def load_packed(
    path: Path, config: Any, dtype: torch.dtype, tell: Tell = lambda line: None, kernel: Kernel = TORCH
) -> Any:
    """The model of the GGUF file `path` on the CPU, its matrices in blocks, the rest in `dtype`.

    config: the model's own. kernel: what multiplies with blocks.
    tell: called with a line before the slow first time, and where matrices stay plain. Raises
    UserError where the file has no blocks of a kind that is known, or as `safetensors_folder` does.
    """
    import transformers
    from accelerate import init_empty_weights

    file = packed_folder(path, tell) / FILE
    with readable_errors(f"{path}, kept packed,"):
        with safe_open(str(file), framework="pt") as stored:
            notes = {name: json.loads(text) for name, text in stored.metadata().items()}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (it is no dict)
        with init_empty_weights(include_buffers=False):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, (kind, of) in notes["packed"].items():
            _replace(model, name, tensors[f"{of}.blocks"], KINDS[kind], tensors.get(f"{name}.bias"), dtype, kernel)
        parameters = {name for name, _ in model.named_parameters()}
        rest = {name: tensors[name].to(dtype) if name in parameters else tensors[name] for name in notes["plain"]}
        model.load_state_dict(rest, strict=False, assign=True)
        if notes["tied"]:
            model.tie_weights()
        left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if left:
            raise ValueError(f"{left[0]} is missing; remove {file.parent}")
        folder = safetensors_folder(path)
        if (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(str(folder))
    if notes["left"]:
        kinds = ", ".join(sorted(set(notes["left"].values())))
        tell(f"weights: {len(notes['packed'])} matrices stay packed, and {len(notes['left'])} do not ({kinds})")
    return model


def _replace(
    model: nn.Module, name: str, blocks: Tensor, kind: Blocks, bias: Tensor | None, dtype: torch.dtype, kernel: Kernel
) -> None:
    embedding = isinstance(model.get_submodule(name), nn.Embedding)
    model.set_submodule(
        name, GgufEmbedding(blocks, kind, dtype) if embedding else GgufLinear(blocks, kind, bias, dtype, kernel)
    )


def packed_folder(path: Path, tell: Tell = lambda line: None) -> Path:
    """The folder with the blocks of the GGUF file `path`, made now where it is not there yet; as safetensors_folder."""
    plain = safetensors_folder(path, tell)
    folder = cached_packed(path)
    if read_mark(folder):
        return folder
    header = read_header(path)
    _require_blocks(path, header)
    tell(f"Packing {path.name} into the cache, once ...")
    with building(folder) as unfinished:
        with readable_errors(f"{path}, kept packed,"):
            _pack(path, header, plain, unfinished / FILE)
        write_mark(unfinished, path)
    return folder


def _require_blocks(path: Path, header: GgufHeader) -> None:
    from gguf import GGMLQuantizationType

    kinds = {GGMLQuantizationType(kind).name for shape, kind, _ in header.tensors.values() if len(shape) == 2}
    if not kinds & KINDS.keys():
        raise UserError(
            f"{path} cannot be kept packed: its matrices are {', '.join(sorted(kinds)) or 'none'}, and those that can "
            f"are {', '.join(KINDS)}; leave out --weights packed."
        )


@dataclass
class _Found:
    """packed: name of a module to the name of its kind and of the module under which its blocks are stored.

    left: name of a matrix that stays plain, to its kind in the file.
    """

    packed: dict[str, tuple[str, str]]
    left: dict[str, str]
    tensors: dict[str, Tensor]


def _pack(path: Path, header: GgufHeader, plain: Path, target: Path) -> None:
    """Write `target`: the blocks of all matrices that have some, and the other tensors of the unpacked model."""
    import gguf
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(plain), dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    architecture = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[header.architecture]
    names = gguf.get_tensor_name_map(architecture, model.config.get_text_config().num_hidden_layers)
    in_file = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = _Found({}, {}, {})
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for name, module in model.named_modules():
        if type(module) is not nn.Linear and module is not embedding:
            continue
        if tied and module is head:
            continue
        tensor = in_file.get(names.get_name(f"{name}.weight", try_suffixes=(".weight",)) or "")
        if tensor is None:
            continue
        kind = KINDS.get(tensor.tensor_type.name)
        blocks = None
        if kind is not None and (module is not embedding or type(module) is nn.Embedding):
            blocks = _blocks_of(torch.from_numpy(tensor.data.copy()), kind, module.weight.detach())
        if kind is None or blocks is None:
            found.left[name] = tensor.tensor_type.name
            continue
        found.tensors[f"{name}.blocks"] = blocks
        found.packed[name] = kind.name, name
    by_module = {module: name for name, module in model.named_modules()}
    if tied and by_module[embedding] in found.packed:
        found.packed[by_module[head]] = found.packed[by_module[embedding]]
        tied = False  # by its blocks from now on
    gone = {f"{name}.weight" for name in found.packed} | ({f"{by_module[head]}.weight"} if tied else set())
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in gone}
    rest = [name for name in state if name.removesuffix(".bias") not in found.packed]
    notes = {"packed": found.packed, "plain": rest, "left": found.left, "tied": tied}
    save_file(state | found.tensors, str(target), {name: json.dumps(value) for name, value in notes.items()})


def _blocks_of(blocks: Tensor, kind: Blocks, weight: Tensor) -> Tensor | None:
    """The rows of `blocks` in the order in which they stand for those of `weight` [m, n] float32.

    None where there is no such order.
    """
    if blocks.shape[0] != weight.shape[0] or kind.width(blocks) != weight.shape[1]:
        return None
    rows = kind.unpacked(blocks)
    if torch.equal(rows, weight):
        return blocks
    places = {row.tobytes(): place for place, row in enumerate(rows.numpy())}
    order = [places.get(row.tobytes()) for row in weight.numpy()]
    return None if None in order else blocks[torch.tensor(order)]
