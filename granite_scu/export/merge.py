r"""Base model and adapter as one model that plain transformers loads.

For each adapted matrix, in fp32, and rounded once to the base's own dtype:

    W' = W + scale B A                 of a QLoRA run: W' = dequantise(quantise(W)) + scale B A

An adapter trained on 4-bit weights has learned on what these round to, so it is that which it is merged into, in every
layer that was held in 4 bits. The base is read shard by shard and never loaded as a model.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from granite_scu.config.errors import RunFailed, UserError
from granite_scu.config.settings import BaseConfig
from granite_scu.control.units import counted, memory
from granite_scu.data.tokens import templates
from granite_scu.data.tokens.chat import answer_end
from granite_scu.export import merge_check
from granite_scu.export.publish import model_card
from granite_scu.model import finding, loading, saved_adapter
from granite_scu.model.base_files import INDEX, SINGLE, weight_files
from granite_scu.model.description_length import by_expert
from granite_scu.model.loading import CPU, WEIGHT_DTYPES
from granite_scu.storage.atomic import UNFINISHED, errors_of_rust, replacing, sweep
from granite_scu.storage.provenance import versions
from granite_scu.storage.run_folder import LOCK, nearest, read_if_there, read_json, require_writable

GENERATION = "generation_config.json"

RECORD = "granite_scu_merge.json"
"""What was merged and how it was checked; tells a merged model of ours from any other folder."""

_WRITTEN = re.compile(
    r"(model.*|config|generation_config|granite_scu_merge|tokenizer.*|special_tokens_map|added_tokens|vocab)\.json"
    r"|model.*\.safetensors|README\.md|\w+\.model|(merges|vocab)\.txt|chat_template\.jinja|additional_chat_templates"
)
"""What a merge writes. Whatever else is in the folder is the user's."""

SPARE = 64 * 2**20
"""Bytes of disk to be left over, for everything that is not weights."""


class Merger:
    """A merge that was asked for. Constructing it refuses what does not fit, and writes nothing.

    Args:
        adapter: what is merged.
        base: what it is merged into.
        out: folder of the merged model.
        in_fp32: store all weights in fp32; as a rule the base's are in 16 bits, whose rounding takes some of a small
            update away.
        device: where 4 bits are rounded to, and the merged model is compared with base and adapter.

    Raises:
        UserError: the adapter does not fit the base, or the base cannot be merged into, or not without bitsandbytes.
    """

    def __init__(
        self,
        adapter: saved_adapter.SavedAdapter,
        base: BaseConfig,
        out: Path,
        in_fp32: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.adapter, self.base, self.out, self.in_fp32, self.device = adapter, base, out, in_fp32, device
        if getattr(loading.load_model_config(base.name), "quantization_config", None):
            raise UserError(
                f"{base.name}: its weights are quantised already, and merging would round the adapter away; download "
                "the model that they were made from, and name its folder by --model"
            )
        # What a QLoRA run holds in 4 bits; before what may be a download, as it takes bitsandbytes.
        self.quantised = loading.four_bit_layers(base.name) if base.quantize_4bit else set()
        self.template = templates.saved_in(*adapter.tokenizer_places)
        self.updates = adapter.updates(base.name)
        self.source = finding.download(base.name)
        self.shards = {file.name: _tensors_of(file) for file in weight_files(self.source, base.name)}
        self.model = loading.meta_model(str(self.source))
        weights = {layer: f"{layer}.weight" for layer in self.quantised}
        weights |= {layer: update.weight for layer, update in self.updates.items()}
        self.layers = {
            name: layer
            for layer, weight in weights.items()
            for name in self._as_stored(weight, self.model.get_parameter(weight))
        }

    def _as_stored(self, weight: str, values: Tensor) -> dict[str, Tensor]:
        """A parameter's values, or what is added to them, by the names of the base's files, as transformers saves them.

        Those may leave out or add the model's prefix, be another version's, or have one matrix for each expert.
        """
        stored = {tensor for tensors in self.shards.values() for tensor in tensors}
        found, prefix = {}, f"{self.model.base_model_prefix}."
        for name, part in revert_weight_conversion(self.model, {weight: values}).items():
            if not (names := stored & {name, name.removeprefix(prefix), prefix + name}):
                raise UserError(
                    f"{self.base.name}: its files hold no {name}; transformers makes it of others when it loads the "
                    "model, so it cannot be merged into matrix by matrix"
                )
            found[names.pop()] = part
        return found

    def check_out(self, overwrite: bool) -> None:
        """Refuse a folder that must not be written to, and a disk that is too full.

        Raises:
            UserError: not writable, not empty, in the way of what is read, or no room.
        """
        out, resolved, place = self.out, self.out.resolve(), nearest(self.out)
        for source in (self.adapter.folder.resolve(), self.source.resolve()):
            if resolved in (source, *source.parents):
                raise UserError(f"--out {out}: holds {source.name}, which is merged from; choose another folder")
        # The new model takes the place of the folder as a whole, and neither of these can be replaced.
        if out.is_symlink():
            raise UserError(f"--out {out}: is a link; name the folder that it leads to")
        if out.is_mount():
            raise UserError(f"--out {out}: a disk is mounted there; name a folder in it")
        _sweep(out)
        require_writable("--out", out, make=False)
        if place == out and any(out.iterdir()):
            if not overwrite:
                raise UserError(f"--out {out}: is not empty; choose another folder, or replace a model by --overwrite")
            if not (out / RECORD).is_file():
                raise UserError(f"--overwrite: {out} is not empty and no merged model of ours, so it is not touched")
            if others := [entry.name for entry in sorted(out.iterdir()) if not _WRITTEN.fullmatch(entry.name)]:
                raise UserError(
                    f"--overwrite: {out} holds {others[0]}, which no merge has written; move that elsewhere"
                )
        wanted = self._wanted(self.in_fp32)
        free = shutil.disk_usage(place).free
        if free < wanted:
            raise UserError(
                f"--out {out}: needs {memory(wanted)}, and {memory(free)} are free there; choose another disk"
            )

    def merge(self, console: Console, check: bool = True) -> dict[str, Any]:
        """Write the merged model, completely or not at all; returns what was recorded about it.

        Args:
            console: where progress goes.
            check: compare the merged model with base and adapter.

        Raises:
            RunFailed: the merged model is not the adapter's.
        """
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.out) as folder, _owned(folder):
            with errors_of_rust(folder):
                self._write_weights(folder, console, self.in_fp32)
                tokenizer = self._write_tokenizer(folder)
            found = None
            if check:
                in_fp32 = partial(self._write_weights_to_check, console=console)
                with console.status("comparing with base and adapter"):
                    found = merge_check.compare(self.adapter, self.base, tokenizer, folder, in_fp32, self.device)
            record = self._record(found)
            _write_json(folder / RECORD, record)
            (folder / "README.md").write_text(_card(record, self._kind()), encoding="utf-8")
        for line in (f"{_what_was_merged(record)}: {self.out}", _how_it_compares(record), *_warnings(record)):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        return record

    def _write_weights_to_check(self, folder: Path, console: Console) -> None:
        """The merge in fp32, of a QLoRA run into what its base is in 4 bits in that; raises RunFailed without room."""
        wanted, free = self._wanted(in_fp32=True), shutil.disk_usage(folder).free
        if free < wanted:
            raise RunFailed(
                f"{self.out}: the merged model loses much of the adapter's gain; to see in fp32 whether it is right "
                f"takes {memory(wanted)}, of which {memory(free)} are free; make room, or merge with --no-check"
            )
        self._write_weights(folder, console, in_fp32=True, dtype=torch.float32)

    def _kind(self) -> dict[str, Any]:
        """What the card is to know of base and adapter."""
        chats = self.adapter.training.get("data_summary", {}).get("conversations")
        return {"model_type": loading.load_model_config(self.base.name).model_type, "chats": bool(chats)}

    def _wanted(self, in_fp32: bool) -> int:
        """Bytes of disk that a merge takes: the base's, and in fp32 four for each floating-point number of it."""
        files = [self.source / shard for shard in self.shards]
        return SPARE + sum(file.stat().st_size + (_more_in_fp32(file) if in_fp32 else 0) for file in files)

    def _write_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        """The base's, with the template of the run; returns it."""
        tokenizer = templates.with_template(loading.load_tokenizer(self.base.name), self.template)
        loading.save_tokenizer(tokenizer, folder)
        if self._kind()["chats"]:
            _end_with_turns(folder / GENERATION, tokenizer)
        return tokenizer

    def _write_weights(self, folder: Path, console: Console, in_fp32: bool, dtype: torch.dtype | None = None) -> None:
        """Weights and configuration; ``dtype`` is what 4 bits are read back in, that of the training if not given."""
        dtype = dtype or WEIGHT_DTYPES.get(self.adapter.precision, torch.bfloat16)
        with (
            self.adapter.open() as factors,
            Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        ):
            task, size = progress.add_task("merging", total=sum(map(len, self.shards.values()))), 0
            # Of two, as the parts of both stacks of a layer's experts take turns.
            update = lru_cache(maxsize=2)(partial(self._update, factors))
            for shard, names in self.shards.items():
                tensors = {}
                with safe_open(self.source / shard, "pt") as file:
                    metadata = file.metadata()
                    for name in names:
                        tensors[name] = self._merged(name, file.get_tensor(name), update, dtype, in_fp32)
                        size += tensors[name].nbytes
                        progress.advance(task)
                save_file(tensors, folder / shard, metadata)
        for name in ("config.json", GENERATION):
            if (self.source / name).is_file():
                shutil.copyfile(self.source / name, folder / name)
        if SINGLE not in self.shards:
            index = read_json(self.source / INDEX)
            _write_json(folder / INDEX, index | {"metadata": index.get("metadata", {}) | {"total_size": size}})
        if in_fp32:
            config = read_json(folder / "config.json")
            config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": "float32"}
            _write_json(folder / "config.json", config)

    def _update(self, factors: Any, layer: str) -> dict[str, Tensor]:
        """What the adapter adds to a layer, by the names of the base's files."""
        update = self.updates[layer]
        a, b = (factors.get_tensor(factor).float() for factor in update.factors)
        if update.experts:
            a, b = by_expert(a, b, update.experts)
        return self._as_stored(update.weight, update.scale * (b @ a))

    def _merged(
        self, name: str, weight: Tensor, update: Callable[[str], dict[str, Tensor]], dtype: torch.dtype, in_fp32: bool
    ) -> Tensor:
        layer = self.layers.get(name)
        kept = torch.float32 if in_fp32 and weight.is_floating_point() else weight.dtype
        if layer is None:
            return weight.to(kept)
        seen = round_to_4_bits(weight, dtype, self.device) if layer in self.quantised else weight
        if layer not in self.updates:
            return seen.to(kept)
        merged = (seen.float() + update(layer)[name]).to(kept).contiguous()
        if not bool(torch.isfinite(merged).all()):
            if not bool(torch.isfinite(weight).all()):
                raise UserError(f"--model {self.base.name}: {name} holds NaN or infinity; download it again")
            raise RunFailed(f"{self.adapter.label}: {name} merged is not finite; the adapter has diverged")
        return merged

    def _record(self, check: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "base_model": model_card.public_name(self.base.name),
            "adapter": self.adapter.folder.resolve().name,
            "adapter_sha256": self.adapter.sha256,
            "matrices": sum(update.experts or 1 for update in self.updates.values()),
            "merged_into": "the base rounded to 4 bits (nf4) and back, as it was trained on"
            if self.quantised
            else "the base as it is",
            "check": check,
            "versions": versions(),
        }


def round_to_4_bits(weight: Tensor, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """A matrix as a QLoRA run has it: rounded to nf4 with double quantisation, and read back in ``dtype``."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(
        weight.to(device, dtype).contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    return functional.dequantize_4bit(packed, state).to("cpu")


def _tensors_of(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _more_in_fp32(file: Path) -> int:
    """Bytes that the tensors of a file take more in fp32; whole numbers stay as they are."""
    with safe_open(file, "pt") as opened:
        tensors = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118 (no mapping)
    kinds = [(re.match(r"B?F(\d+)", tensor.get_dtype()), math.prod(tensor.get_shape())) for tensor in tensors]
    return sum(count * (4 - int(bits[1]) // 8) for bits, count in kinds if bits)


def _end_with_turns(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have whoever generates stop where the chat template ends a turn, which a base that knows no chats does not."""
    settings, end = read_if_there(file), answer_end(tokenizer)
    of_model = read_json(file.with_name("config.json")).get("eos_token_id", tokenizer.eos_token_id)
    ends = settings.get("eos_token_id", of_model)
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end is not None and end not in ends:
        _write_json(file, settings | {"eos_token_id": [*ends, end]})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _what_was_merged(record: dict[str, Any]) -> str:
    return f"{record['matrices']} matrices merged into {record['merged_into']}"


def _how_it_compares(record: dict[str, Any]) -> str:
    check = record["check"]
    if check is None:
        return "not compared with base and adapter"
    kept = "the adapter gains nothing there"
    if check["kept"] is not None:
        gain = check["base_bpt"] - check["adapter_bpt"]
        kept = (
            f"{check['kept']:.1%} of the adapter's gain of {gain:.4f} kept (standard error {check['error'] / gain:.1%})"
        )
    return (
        f"on {check['text']} ({counted(check['documents'], 'document')}, {counted(check['tokens'], 'token')}, in "
        f"{check['dtype']}): base {check['base_bpt']:.4f}, base with adapter {check['adapter_bpt']:.4f}, merged "
        f"{check['merged_bpt']:.4f} bits per token; {kept.replace('%', ' %')}"
    )


def _warnings(record: dict[str, Any]) -> list[str]:
    check, found = record["check"], []
    if check and not check["is_merged"]:
        found.append(
            f"warning: rounding to {check['dtype']} changes this model by {check['difference']:+.4f} bits per token; "
            f"the merge itself is right (in fp32 {check['in_fp32']:.1e} at most): use the adapter unmerged, or "
            "--dtype fp32, which keeps all of it in twice the space"
        )
    if check and check["text"] == merge_check.OWN and check["adapter_bpt"] > check["base_bpt"]:
        found.append("warning: there base with adapter is worse than the base alone")
    return found


def _card(record: dict[str, Any], of: dict[str, Any]) -> str:
    """The README.md of a merged model; ``of`` has the base's ``model_type`` and whether it learned ``chats``."""
    base = record["base_model"]
    licence = model_card.known_license(base)
    fields = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if "/" in base else {}),  # of a local folder the hub knows nothing
        **({"license": licence} if licence else {}),
        "tags": [*model_card.family(of["model_type"]), "scu", "merged"],
    }
    return model_card.TEMPLATES.get_template("merged_model_card.md.jinja").render(
        metadata=yaml.safe_dump(fields, sort_keys=False),
        base=base,
        record=record,
        chats=of["chats"],
        merged=_what_was_merged(record),
        compared=_how_it_compares(record),
    )


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Make a folder whose lock says that its merge still runs; a system lets go of it with the process."""
    folder.mkdir()
    with FileLock(folder / LOCK):
        yield
    (folder / LOCK).unlink(missing_ok=True)  # some versions of filelock remove it


def _sweep(out: Path) -> None:
    """Put right what merges into this folder left that were killed, which may be as large as the model.

    Raises:
        UserError: one of them is running.
    """
    beside = out.parent.glob(".*") if out.parent.is_dir() else []
    left = [entry for entry in beside if (found := UNFINISHED.fullmatch(entry.name)) and found["name"] == out.name]
    for entry in left:
        if (entry / LOCK).is_file():
            try:
                with FileLock(entry / LOCK, timeout=0):
                    pass
            except Timeout:
                raise UserError(f"--out {out}: another merge is writing it; wait for it, or choose another") from None
    sweep(left)
