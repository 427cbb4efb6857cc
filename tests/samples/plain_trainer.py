"""A small trainer of plain PyTorch and transformers that passes every check of `harness conformance`, or has one fault.

harness conformance tests/samples/plain_trainer.py
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

from harness.conformance import Layout, NotSupported

# Each is seen by the check of its name.
FAULTS = {
    "packed-equals-unpacked": "attention crosses the boundaries of a packed row",
    "attention-boundaries": "attention crosses the boundaries of a packed row",
    "scan-boundaries": "states of linear attention cross the boundaries of a packed row",
    "labels-at-boundaries": "the first token of a packed conversation keeps its label",
    "padding-changes-nothing": "padding is trained",
    "token-mean-over-microbatches": "each microbatch is divided by its own tokens",
    "token-mean-over-packed-rows": "each microbatch is divided by its own tokens",
    "token-mean-over-ranks": "each rank divides by its own tokens",
    "conversation-mean": "conversations are averaged by token",
    "conversation-mean-over-ranks": "each rank divides by its own conversations",
    "evaluation-mean": "the validation loss is a mean of means",
    "positions-restart": "positions continue in a packed row",
    "epoch-is-complete": "the last pack is dropped",
    "epoch-is-complete-unpacked": "an incomplete last step is dropped",
    "epoch-is-complete-on-ranks": "ranks repeat rows to have equally many",
    "long-conversation-is-kept": "long conversations are cut",
    "shuffle-ignores-workers": "workers change the order",
    "shuffle-follows-the-seed": "the seed is ignored",
    "resume-within-an-epoch": "the epoch begins again after a resume",
    "resume-at-the-end-of-an-epoch": "the position of an ended epoch is 0",
    "resume-with-workers": "what workers read ahead is lost at a resume",
    "resume-on-ranks": "rank 1 resumes at the beginning",
    "resume-on-one-rank": "a checkpoint counts steps of its own ranks",
    "resume-on-more-ranks": "a rank that was not there begins at the beginning",
    "resume-restores-the-optimizer": "a checkpoint has no moments of the optimizer",
    "experts-packed-equal-unpacked": "attention crosses the boundaries of a packed row",
    "router-ignores-padding": "padding reaches the router",
    "mtp-ignores-padding": "the layer of further tokens reads the next conversation",
    "mtp-with-tensor-parallel-equals-one-rank": "gradients are not summed over ranks",
    "tensor-parallel-equals-one-rank": "gradients are not summed over ranks",
    "expert-parallel-equals-one-rank": "gradients of experts are not summed over ranks",
    "experts-with-tensor-parallel-equal-one-rank": "gradients of experts are not summed over ranks",
    "lora-equals-merged": "adapters are merged with another scale",
    "stock-templates-are-masked": "users are trained",
    "damaged-checkpoint-is-refused": "checkpoints have no checksums",
    "assistant-alone-is-trained": "users are trained",
    "end-token-is-trained": "the end of a turn is not trained",
    "tool-schemas-are-written": "tools are dropped",
    "tool-results-are-kept": "of two tool results the first is dropped",
}


class Trainer:
    """A target of `harness.conformance`.

    Args:
        fault: one of the values of FAULTS, which the trainer then has.
    """

    name, version = "plain", "1"

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Any:
        import transformers

        self._ranks = layout.dp_size * layout.tp_size
        if self._ranks > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        self._rank = int(os.environ.get("RANK", "0"))
        self._layout, self._folder, self._done = layout, model_folder, 0
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
        self._data = [json.loads(line) for line in data.read_text().splitlines()]
        if layout.mtp_loss:
            self._model.further = self._read_further(model_folder)
        self._adapters = self._add_adapters(layout.lora_rank) if layout.lora_rank else {}
        trained = {f"{name}.{place}": each for name, pair in self._adapters.items() for place, each in enumerate(pair)}
        self._trained = trained or dict(self._model.named_parameters())
        self._optimizer = torch.optim.Adam(self._trained.values(), lr=layout.learning_rate)
        return self._step

    def _read_further(self, folder: Path) -> torch.nn.ModuleDict:
        """Return the layer that predicts the token after the next, of the names that follow those of the last layer."""
        from safetensors.torch import load_file
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        config = self._model.config
        at, size = f"model.layers.{config.num_hidden_layers}.", config.hidden_size
        stored = load_file(folder / "model.safetensors")
        further = torch.nn.ModuleDict({"layer": LlamaDecoderLayer(config, layer_idx=config.num_hidden_layers)})
        further["eh_proj"] = torch.nn.Linear(2 * size, size, bias=False)
        further.update({name: torch.nn.RMSNorm(size, eps=config.rms_norm_eps) for name in ("enorm", "hnorm", "norm")})
        names = {name: name.removeprefix("layer.") for name in further.state_dict()}
        names["norm.weight"] = "shared_head.norm.weight"
        further.load_state_dict({name: stored[at + theirs] for name, theirs in names.items()})
        return further

    def _add_adapters(self, rank: int) -> dict[str, Any]:
        adapters = {}
        for name, module in self._model.named_modules():
            if name.endswith("q_proj"):
                down = torch.nn.Parameter(torch.randn(rank, module.in_features) / 8)
                adapters[name] = pair = (down, torch.nn.Parameter(torch.zeros(module.out_features, rank)))
                module.register_forward_hook(
                    lambda module, inputs, output, pair=pair: output + 2.0 * inputs[0] @ pair[0].T @ pair[1].T
                )
        return adapters

    def merge(self, folder: Path) -> None:
        scale = 1.0 if self._fault == "adapters are merged with another scale" else 2.0
        modules = dict(self._model.named_modules())
        with torch.no_grad():
            for name, (down, up) in self._adapters.items():
                modules[name].weight += scale * up @ down
        self._model.save_pretrained(folder)

    def _step(self, batch: Any) -> tuple[float, float]:
        layout, has = self._layout, self._fault.__eq__
        place, self._balance, self._ahead = self._rank % layout.dp_size, [], []
        own = self._rows(batch)[place :: layout.dp_size]
        size = -(-len(own) // layout.microbatches)
        groups = [own[first : first + size] for first in range(0, len(own), size)]
        losses = [torch.cat([self._losses(row) for row in self._padded(group)]) for group in groups]
        tokens = self._sum(sum(map(len, losses)))
        if layout.loss_average == "conversation" and not has("conversations are averaged by token"):
            means = [each.mean() for row in own for each in self._by_conversation(row)]
            ranks = layout.dp_size if has("each rank divides by its own conversations") else 0
            loss = sum(means) / (len(means) * ranks or self._sum(len(means)))
        elif has("each microbatch is divided by its own tokens"):
            loss = sum(each.mean() for each in losses) / len(losses)
        elif has("each rank divides by its own tokens"):
            loss = torch.cat(losses).mean() / layout.dp_size
        else:
            loss = torch.cat(losses).sum() / tokens
        self._optimizer.zero_grad()
        further = sum(each.sum() for each in self._ahead) / (self._sum(sum(map(len, self._ahead))) or 1.0)
        (loss + layout.router_loss * sum(self._balance) + layout.mtp_loss * further).backward()
        squares, unsummed = 0.0, has("gradients are not summed over ranks")
        for name, parameter in self._trained.items():
            is_alone = unsummed or (has("gradients of experts are not summed over ranks") and "experts" in name)
            if self._ranks > 1 and not is_alone:
                torch.distributed.all_reduce(parameter.grad)
            squares += float((parameter.grad**2).sum())
        self._optimizer.step()
        return self._sum(float(loss.detach())), math.sqrt(squares)

    def _sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        if self._ranks > 1:
            torch.distributed.all_reduce(total)
        return float(total)

    def _padded(self, rows: list[Any]) -> list[Any]:
        size = self._layout.pack_size
        if self._fault == "padding reaches the router":
            return [
                {
                    "input_ids": row["input_ids"] + [0] * (size - len(row["input_ids"])),
                    "labels": row["labels"] + [-100] * (size - len(row["labels"])),
                    "position_ids": row["position_ids"] + list(range(size - len(row["labels"]))),
                }
                for row in rows
            ]
        if self._fault != "padding is trained":
            return rows  # a padded row is its real part, because attention is causal
        longest = max(len(row["input_ids"]) for row in rows)
        return [
            {
                "input_ids": row["input_ids"] + [0] * (longest - len(row["input_ids"])),
                "labels": row["labels"] + [0] * (longest - len(row["labels"])),
                "position_ids": list(range(longest)),
            }
            for row in rows
        ]

    def _losses(self, row: Any) -> torch.Tensor:
        ids, positions = torch.tensor(row["input_ids"]), torch.tensor(row["position_ids"])
        document = (positions == 0).cumsum(0)
        allowed = (document[:, None] == document).tril()
        if self._fault == "attention crosses the boundaries of a packed row":
            allowed = torch.ones_like(allowed).tril()
        mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
        wanted = {"output_router_logits": True} if self._layout.router_loss else {}
        if self._model.config.model_type == "qwen3_5_text":
            leaks = self._fault == "states of linear attention cross the boundaries of a packed row"
            ends = [len(ids)] if leaks else document.bincount()[1:].tolist()
            alone = [self._model.model(one[None]).last_hidden_state[0] for one in ids.split(ends)]
            made = SimpleNamespace(last_hidden_state=torch.cat(alone)[None])
        else:
            made = self._model.model(ids[None], position_ids=positions[None], attention_mask=mask[None, None], **wanted)
        logits = self._model.lm_head(made.last_hidden_state[0])
        for layer in getattr(made, "router_logits", None) or ():
            shares = layer.softmax(dim=-1)
            self._balance.append((shares.mean(dim=0) ** 2).sum())
        labels = torch.tensor(row["labels"])[1:]
        kept = labels != -100
        if self._layout.tp_size > 1:  # each rank has the losses of its share of the tokens
            kept &= torch.arange(len(labels)) % self._layout.tp_size == self._rank
        if self._layout.mtp_loss:
            self._ahead.append(self._predict_further(made.last_hidden_state, ids, row["labels"], positions, mask))
        return torch.nn.functional.cross_entropy(logits[:-1][kept], labels[kept], reduction="none")

    def _by_conversation(self, row: Any) -> tuple[torch.Tensor, ...]:
        """Return the losses of each conversation of a row."""
        starts = [place for place, position in enumerate(row["position_ids"]) if position == 0]
        parts = (row["labels"][start:end] for start, end in zip(starts, [*starts[1:], None], strict=True))
        return self._losses(row).split([sum(label != -100 for label in part) for part in parts])

    def _predict_further(self, states: Any, ids: Any, labels: Any, positions: Any, mask: Any) -> torch.Tensor:
        """Return the losses of the token after the next, of this rank's share of the tokens."""
        model, further, document = self._model.model, self._model.further, (positions == 0).cumsum(0)
        embedded = further["enorm"](model.embed_tokens(ids.roll(-1))[None])
        joined = further["eh_proj"](torch.cat((embedded, further["hnorm"](states)), dim=-1))
        angles = model.rotary_emb(joined, positions[None])
        made = further["layer"](joined, attention_mask=mask[None, None], position_embeddings=angles)
        made = made[0] if isinstance(made, tuple) else made
        logits, labels = self._model.lm_head(further["norm"](made))[0][:-2], torch.tensor(labels)[2:]
        kept = labels != -100
        if self._fault != "the layer of further tokens reads the next conversation":
            kept &= document[2:] == document[:-2]
        if self._layout.tp_size > 1:
            kept &= torch.arange(len(labels)) % self._layout.tp_size == self._rank
        return torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="none")

    def _rows(self, data: Any) -> list[Any]:
        """Return rows of whole conversations, packed in their order."""
        size, rows = self._layout.pack_size, []
        for one in data:
            count = len(one["input_ids"])
            if size and count > size:
                if self._fault != "long conversations are cut":
                    raise ValueError(f"a conversation of {count} tokens does not fit a row of {size}")
                one, count = {name: values[:size] for name, values in one.items()}, size
            if not size or not rows or len(rows[-1]["input_ids"]) + count > size:
                rows.append({"input_ids": [], "labels": [], "position_ids": []})
            row, labels = rows[-1], list(one["labels"])
            if self._fault != "the first token of a packed conversation keeps its label":
                labels[0] = -100
            start = len(row["input_ids"]) if self._fault == "positions continue in a packed row" else 0
            row["input_ids"] += one["input_ids"]
            row["labels"] += labels
            row["position_ids"] += range(start, start + count)
        return rows

    def evaluate(self, batch: Any) -> float:
        means = [self._losses(row) for row in self._rows(batch)]
        if self._fault == "the validation loss is a mean of means":
            return float(torch.stack([each.mean() for each in means]).mean().detach())
        return float(torch.cat(means).mean().detach())

    def rows(self, steps: int | None) -> list[list[Any]]:
        layout, has = self._layout, self._fault.__eq__
        rows = self._rows(self._data)
        if has("the last pack is dropped"):
            rows = rows[:-1]
        if layout.shuffle:
            seed = 0 if has("the seed is ignored") else layout.seed
            seed += layout.num_workers if has("workers change the order") else 0
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
            rows = [rows[place] for place in order]
        if has("ranks repeat rows to have equally many"):
            rows += rows[: -len(rows) % (layout.dp_size * layout.microbatches)]
        own = rows[self._rank :: layout.dp_size]
        loaded = list(DataLoader(own, batch_size=None, num_workers=layout.num_workers, collate_fn=dict))
        groups = [loaded[first : first + layout.microbatches] for first in range(0, len(loaded), layout.microbatches)]
        if has("an incomplete last step is dropped"):
            groups = [group for group in groups if len(group) == layout.microbatches]
        first, last = self._done, len(groups) if steps is None else self._done + steps
        self._done = min(last, len(groups))
        return groups[first:last]

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        position, ended = self._done, self._done * self._layout.microbatches >= len(self._rows(self._data))
        if self._fault == "what workers read ahead is lost at a resume":
            position += self._layout.num_workers
        if self._fault == "the position of an ended epoch is 0" and ended:
            position = 0
        weights = b"".join(each.detach().numpy().tobytes() for each in self._model.parameters())
        (folder / f"weights-{self._rank}").write_bytes(weights)
        torch.save(self._optimizer.state_dict(), folder / f"moments-{self._rank}.pt")
        if self._fault != "a checkpoint counts steps of its own ranks":
            position *= self._layout.dp_size * self._layout.microbatches
        (folder / f"position-{self._rank}").write_text(json.dumps([position, zlib.crc32(weights)]))

    def load(self, folder: Path) -> None:
        rank = self._rank if (folder / f"position-{self._rank}").exists() else 0
        self._done, checksum = json.loads((folder / f"position-{rank}").read_text())
        if self._fault != "a checkpoint counts steps of its own ranks":
            self._done //= self._layout.dp_size * self._layout.microbatches
        if self._fault == "a rank that was not there begins at the beginning" and rank != self._rank:
            self._done = 0
        if self._fault == "the epoch begins again after a resume":
            self._done = 0
        if self._fault == "rank 1 resumes at the beginning" and self._rank == 1:
            self._done = 0
        weights = (folder / f"weights-{rank}").read_bytes()
        if zlib.crc32(weights) != checksum and self._fault != "checkpoints have no checksums":
            raise ValueError(f"weights-{rank} is damaged")
        values = torch.frombuffer(bytearray(weights), dtype=torch.float32)
        torch.nn.utils.vector_to_parameters(values, self._model.parameters())
        if self._fault != "a checkpoint has no moments of the optimizer":
            self._optimizer.load_state_dict(torch.load(folder / f"moments-{rank}.pt"))

    def render(self, records: Any) -> list[Any]:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(self._folder)
        if not re.search(r"{%-?\s*generation", tokenizer.chat_template) and self._fault != "users are trained":
            raise ValueError("the template does not mark what an assistant generates")
        rendered = []
        for record in records:
            messages, tools = list(record["messages"]), record.get("tools")
            if self._fault == "tools are dropped":
                tools = None
            if self._fault == "of two tool results the first is dropped":
                pairs = zip(messages, [*messages[1:], {}], strict=True)
                messages = [one for one, after in pairs if not one["role"] == after.get("role") == "tool"]
            made = tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = made["input_ids"], made["assistant_masks"]
            if self._fault == "users are trained":
                mask = [1] * len(ids)
            end = tokenizer.convert_tokens_to_ids("<|im_end|>")
            if self._fault == "the end of a turn is not trained":
                mask = [kept and token != end for kept, token in zip(mask, ids, strict=True)]
            labels = [token if kept else -100 for kept, token in zip(mask, ids, strict=True)]
            rendered.append({"input_ids": ids, "labels": labels})
        return rendered


class WithoutRows:
    """A target of one method."""

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Any:
        if layout.pack_size:
            raise NotSupported("it does not pack")
        return Trainer().build(model_folder, data, layout)


def __getattr__(name: str) -> Any:
    """Return a trainer with the fault that the check `name`, with underscores, sees."""
    if (fault := FAULTS.get(name.replace("_", "-"))) is None:
        raise AttributeError(name)
    return partial(Trainer, fault)
