"""A trained model is exported as a folder that serves: it answers, stops, and says where it comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harness.errors import ConfigError, HarnessError
from harness.formats import load_manifest
from harness.megatron.export.folder import Exported, export_checkpoint
from harness.plan.settings import SftConfig
from harness.prep import PrepareConfig, TokenizerConfig, prepare
from harness.prep.packing import PackingConfig
from harness.prep.sources.config import SourceConfig
from harness.prep.tokenize.bpe import train_bpe
from harness.recipes import sft
from harness.storage import read_checksums
from harness.storage.checksums import digest_files, write_checksums

from .conftest import run_here

# As most published templates: no generation marks; the tokenizer's own end token is another than that of a turn.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWERS = {
    "What is the capital of France?": "Paris.",
    "Which animal barks?": "A dog, of course.",
    "Count to five.": "One, two, three, four, five.",
}
SETTINGS = (
    *("model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.max_sequence_length=256"),
    *("loader.global_batch_size=4", "loader.num_workers=0", "schedule.max_tokens_per_rank=512", "optimizer.lr=0.01"),
    *("optimizer.min_lr_ratio=0.1", "optimizer.warmup_steps=2", "trainer.device=cpu", "trainer.trackers=[]"),
    *("trainer.eval_interval=0", "trainer.checkpoint_interval=0", "trainer.sample_tokens=24"),
    f"trainer.sample_prompts={json.dumps(list(ANSWERS))}",
)


def set_end_of_text(tokenizer: Path) -> None:
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in ANSWERS.items()
    ] * 20
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    train_bpe([*ANSWERS, *ANSWERS.values()], folder / "own", vocab_size=290)
    set_end_of_text(folder / "own")
    prepare(
        PrepareConfig(
            source=SourceConfig(kind="files", path=str(folder / "chats.jsonl")),
            tokenizer=TokenizerConfig(name=str(folder / "own"), mask="assistant_turns"),
            data=PackingConfig(path=str(folder / "data"), pack_size=128, num_workers=0, validation_fraction=0.0),
        )
    )
    return folder / "data"


def train(data: Path, folder: Path, *overrides: str) -> Path:
    run_here(sft, SftConfig, [f"data.path={data}", f"run_dir={folder}", *SETTINGS, *overrides])
    return folder


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(data, tmp_path_factory.mktemp("runs") / "parrot", "trainer.steps=40")


@pytest.fixture(scope="module")
def folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "parrot"
    export_checkpoint(run, out)
    return out


def generate(model: Any, folder: Path, question: str) -> str:
    """Return everything that a model generates by the settings of its folder alone, special tokens included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        return str(tokenizer.decode(model.generate(**prompt)[0, prompt["input_ids"].shape[1] :]))


def test_generation_stops_at_the_end_of_the_turn(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {question: generate(model, folder, question) for question in ANSWERS} == {
        question: f"{answer}<|im_end|>" for question, answer in ANSWERS.items()
    }


def test_the_folder_has_every_end_token_another_padding_and_the_template_that_was_trained(folder, data) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    generation, config = (json.loads((folder / f"{name}.json").read_text()) for name in ("generation_config", "config"))
    assert generation["eos_token_id"] == config["eos_token_id"] == sorted(ids)
    # Without another limit, an answer may be as long as the model's positions allow.
    assert generation["max_length"] == config["max_position_embeddings"] == 256
    assert config["dtype"] == config["torch_dtype"] == "float32"
    # The tokenizer pads with its end token, and has no other.
    assert generation["pad_token_id"] == config["pad_token_id"] == ids[0]
    assert "which also ends an answer: the tokenizer has no other" in (folder / "README.md").read_text()
    assert tokenizer.chat_template == TEMPLATE
    for file in (data / "tokenizer").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_the_card_has_the_facts_of_data_and_run(folder: Path, run: Path, data: Path) -> None:
    card = (folder / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["megatron-core"]}
    manifest = load_manifest(data / "train")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for fact in (
        *(
            str(data),
            manifest.fingerprint,
            f"{manifest.num_tokens:,}, of which {manifest.num_trained_tokens:,} trained",
        ),
        *(f"assistant_turns ({manifest.provenance.mask['why']})", manifest.provenance.tokenizer_hash),
        *(r"\<\|endoftext\|\> (0), \<\|im_end\|\> (2)", manifest.provenance.chat_template_hash),
        *("none: trained from random weights", f"{last['loss']:.4f} at step 40", "ranks 1, tensor 1"),
    ):
        assert fact in card
    assert "# parrot, step 40" in card
    assert "Not in this folder" not in card
    names: dict[str, Any] = {}
    code = card.split("```python\n")[1].split("```")[0]
    exec(code.replace('folder = "."', f"folder = {str(folder)!r}"), names)
    assert names["answer"].shape[0] > 0


def test_samples_of_a_run_are_the_answers_that_it_learned(run: Path) -> None:
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {line["prompt"]: line["answer"] for line in samples if line["step"] == 40} == ANSWERS


def export_of(run: Path, tmp_path: Path, **settings: Any) -> tuple[Exported, str]:
    """Export a copy of a run with other settings of its data; return the summary and the card."""
    shutil.copytree(run, tmp_path / "run")
    # The settings that count are those of the checkpoint, which its checksums cover.
    (tmp_path / "run" / "config.yaml").write_text("model: {num_layers: 9}\n")
    for file in (tmp_path / "run").glob("checkpoints/*/run.json"):
        document = json.loads(file.read_text())
        document["settings"]["data"] |= settings
        if "sequence_length" in settings:  # of a corpus: nothing of packs
            document["settings"]["data"] = settings
            del document["settings"]["schedule"]
        file.write_text(json.dumps(document))
        files = read_checksums(file.parent) or []
        write_checksums(file.parent, digest_files(file.parent, [stored.path for stored in files]))
    done = export_checkpoint(tmp_path / "run", tmp_path / "out")
    return done, (tmp_path / "out" / "README.md").read_text()


def test_without_its_data_a_run_is_exported_and_what_is_missing_is_named(run: Path, tmp_path: Path) -> None:
    done, card = export_of(run, tmp_path, path=str(tmp_path / "gone"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "checksums.json", "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    assert not done.has_tokenizer
    assert done.end_tokens == ()
    first, second = done.missing
    assert first.startswith(f"facts of the data, tokenizer and chat template: {tmp_path / 'gone'}")
    assert second == "end tokens of the data: generation ends only at its length limit"
    assert "## Not in this folder" in card
    assert all(line in card for line in done.missing)
    assert "eos_token_id" not in json.loads((tmp_path / "out" / "generation_config.json").read_text())


def test_data_that_was_moved_is_found_where_data_paths_says_and_other_data_is_not_taken_for_it(
    run: Path, data: Path, tmp_path: Path
) -> None:
    export_of(run, tmp_path, path=str(tmp_path / "gone"))
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)
    done = export_checkpoint(tmp_path / "run", tmp_path / "again", data_paths=[str(moved)])
    assert (done.has_tokenizer, done.missing) == (True, ())
    with pytest.raises(HarnessError, match="nowhere"):
        export_checkpoint(tmp_path / "run", tmp_path / "none", data_paths=[str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="the run has 1 data source"):
        export_checkpoint(tmp_path / "run", tmp_path / "two", data_paths=[str(moved), str(moved)])
    path, fingerprint = moved / "train" / "manifest.json", load_manifest(data / "train").fingerprint
    path.write_text(json.dumps({**json.loads(path.read_text()), "fingerprint": "0" * 32, "checksum": ""}))
    with pytest.raises(ConfigError, match="has the fingerprint"):
        export_checkpoint(tmp_path / "run", tmp_path / "other", data_paths=[str(moved)])
    done, _ = export_of(run, tmp_path / "prepared again", path=str(moved))
    assert not done.has_tokenizer
    assert f"has the fingerprint {'0' * 32}, but the run was trained on {fingerprint}" in done.missing[0]


def test_a_tokenizer_that_was_changed_is_not_taken_and_the_same_one_elsewhere_is(run, data, tmp_path) -> None:
    shutil.copytree(data, tmp_path / "data")
    changed = tmp_path / "data" / "tokenizer" / "chat_template.jinja"
    assert changed.exists()
    changed.write_text("{{ messages[0]['content'] }}")
    done, _ = export_of(run, tmp_path, path=str(tmp_path / "data"))
    assert not done.has_tokenizer
    assert "has the chat template" in done.missing[0]
    # Beside a model, whose other files are not those of a tokenizer.
    shutil.copytree(data / "tokenizer", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    again, _ = export_of(run, tmp_path / "again", path=str(tmp_path / "data"), tokenizer=str(tmp_path / "model"))
    assert (again.has_tokenizer, again.missing) == (True, ())
    assert json.loads((tmp_path / "again" / "out" / "config.json").read_text())["model_type"] == "llama"


def test_a_run_on_live_chunks_has_the_tokenizer_of_its_settings_and_the_mask_of_that_dataset(run, data, tmp_path):
    live = {"path": str(tmp_path / "live"), "tokenizer": {"name": str(data / "tokenizer")}}
    done, card = export_of(run, tmp_path, live=live)
    assert (done.end_tokens, done.missing) == (("<|endoftext|>", "<|im_end|>"), ())
    assert f"| dataset | {tmp_path / 'live'} |" in card
    assert "| mask | assistant_turns (" in card
    # Chunks of packs name no tokenizer.
    live["tokenizer"]["name"] = ""
    done, _ = export_of(run, tmp_path / "packs", live=live)
    assert not done.has_tokenizer
    assert done.missing[0] == f"tokenizer and chat template: {tmp_path / 'live'}: chunks of packs do not list them"


def test_a_corpus_ends_answers_at_the_end_of_a_document(run: Path, data: Path, tmp_path: Path) -> None:
    corpus = {"sequence_length": 64, "per_split_data_args_path": None, "blend_per_split": {}, "eod": 7}
    done, card = export_of(run, tmp_path / "a", **corpus, path=str(tmp_path / "corpus"))
    assert not done.has_tokenizer
    generation = json.loads((tmp_path / "a" / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [7]
    assert "| end of a document | token 7 |" in card
    # A packed dataset among the sources names a tokenizer.
    sources = [{"path": str(tmp_path / "corpus")}, {"path": str(data / "train")}]
    done, _ = export_of(run, tmp_path / "b", **corpus, blend=sources)
    assert (done.has_tokenizer, len(done.end_tokens)) == (True, 3)


def test_adapters_serve_through_peft_merged_or_not(folder: Path, data: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, GenerationConfig

    # Published base models know the end of a text, and not that of a turn.
    base = shutil.copytree(folder, tmp_path / "base")
    for name in ("config.json", "generation_config.json"):
        values = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps({**values, "eos_token_id": min(values["eos_token_id"])}))
    lora = [f"model.init_from={base}", "model.lora_rank=4", "model.lora_alpha=8", "trainer.steps=2"]
    run = train(data, tmp_path / "lora", *lora)
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    export_checkpoint(run, whole)
    done = export_checkpoint(run, adapter, adapters_only=True)
    assert done.end_tokens == ("<|endoftext|>", "<|im_end|>")
    assert {path.name for path in adapter.iterdir() if "token" not in path.name} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "checksums.json",
        "generation_config.json",
    }
    card = (adapter / "README.md").read_text()
    assert "library_name: peft" in card
    assert "| LoRA | rank 4, alpha 8, " in card
    assert f"| base model | {base} |" in card
    expected = {question: f"{answer}<|im_end|>" for question, answer in ANSWERS.items()}
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    model.generation_config = GenerationConfig.from_pretrained(adapter)
    assert {question: generate(model, adapter, question) for question in ANSWERS} == expected
    merged = model.merge_and_unload()
    assert {question: generate(merged, adapter, question) for question in ANSWERS} == expected
    exported_whole = AutoModelForCausalLM.from_pretrained(whole)
    assert {question: generate(exported_whole, whole, question) for question in ANSWERS} == expected
