"""Encoders in front of the text model: the logits and the weights of transformers, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.recipes.parity import ParityConfig
from media_models import picture, sound
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness.config import compose_config
from harness.errors import ConfigError, HarnessError
from harness.formats import open_dataset
from harness.loader.plan import row_media
from harness.megatron.batch import run_row, to_device
from harness.megatron.export.folder import export_checkpoint
from harness.megatron.hf_files import HfWeights
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.gpt import build_model
from harness.megatron.model.media import MediaEncoder
from harness.megatron.pretrained import find_pretrained
from harness.megatron.weights import hf_tensors
from harness.parity.made_data import _image, _rules_of, _sound, make_dataset
from harness.parity.reference import make_model
from harness.plan import ModelConfig, ParallelConfig, SftConfig
from harness.plan.encoders import MEDIA_MODELS, encoder_work, read_encoder, rope_axes
from harness.plan.hf_config import HfModel, complete_model, read_hf_config, to_hf_config
from harness.prep.media import measure
from harness.recipes import sft
from harness.records import Medium, SequenceView
from harness.thd import ThdBatch, build_thd_batch, context_parallel_indices
from harness.train.metrics import read_metrics

from .conftest import run_here

SIGLIP = {
    "image_token_index": 299,
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 42,
        "patch_size": 14,
    },
    "vision_feature_select_strategy": "full",
    "text_config": {"model_type": "qwen2", "tie_word_embeddings": False},
}
NAMES = [*MEDIA_MODELS, "siglip"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a small random model of each kind, as transformers saves it."""
    models, place = compose_config("parity", ParityConfig).models, tmp_path_factory.mktemp("models")
    for name in MEDIA_MODELS:
        make_model(name, models[name], place / name)
    make_model("llava", SIGLIP, place / "siglip")
    return {name: place / name for name in NAMES}


def model_of(folder: Path) -> ModelConfig:
    return ModelConfig(**read_hf_config(folder).settings, max_sequence_length=512, init_from=str(folder))


def made_sequences(encoder: str) -> list[SequenceView]:
    """Return sequences without media, with one, and with two that follow each other."""
    rng, rules = np.random.default_rng(1), _rules_of(encoder)
    ((kind, token),) = rules.tokens.items()
    sequences = []
    for count in (1, 0, 2):
        ids, media = rng.integers(0, 290, 3).tolist(), []
        for _ in range(count):
            data = _sound(rng) if kind == "audio" else _image(rng)
            media.append(Medium(kind, len(ids), rules.count_tokens(kind, measure(kind, data)), data))
            # Between two images with a grid, templates write a token.
            ids += [token] * media[-1].tokens + [7] * rules.has_grids
        ids += rng.integers(0, 290, 6).tolist()
        sequences.append(SequenceView(np.array(ids, np.int32), np.zeros(len(ids), np.uint8), tuple(media)))
    return sequences


def row_of(sequences: list[SequenceView], features: Callable[..., Any]) -> ThdBatch:
    row = build_thd_batch(sequences, pad_to_multiple=4)
    return replace(row, media=row_media([one.media for one in sequences], features))


def chunk_of(model: ModelConfig) -> Any:
    """Return the model of a job of one rank, with its stored weights."""
    layout, pretrained = join(ParallelConfig(), 1), find_pretrained(model)
    options = {"vocab_size": pretrained.vocab_size, "device": torch.device("cpu")}
    (chunk,) = build_model(model, ParallelConfig(), fill=pretrained.filler(layout), **options)
    return chunk


def transformers_logits(model: ModelConfig, sequences: list[SequenceView]) -> np.ndarray:
    """Return the logits of unpacked sequences, float32 [model tokens, vocabulary]."""
    import transformers

    rules = _rules_of(model.encoder)
    plain = getattr(transformers, model.media.architecture).from_pretrained(model.init_from).eval()
    found = []
    for one in sequences:
        ids = torch.from_numpy(one.input_ids).long()[None, :-1]
        arrays = {name: torch.from_numpy(array) for name, array in rules.features(one.media).items()}
        with torch.no_grad():
            if "image_grid_thw" in arrays:
                arrays["mm_token_type_ids"] = (ids == plain.config.image_token_id).int()
            found.append(plain(input_ids=ids, attention_mask=torch.ones_like(ids), **arrays).logits[0].numpy())
    return np.concatenate(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_row_has_the_logits_of_transformers_and_the_weights_come_back_bit_by_bit(
    folders, tmp_path, name
) -> None:
    folder, model = folders[name], model_of(folders[name])
    sequences, rules = made_sequences(model.encoder), _rules_of(model.encoder)
    row, vocab = row_of(sequences, rules.features), read_hf_config(folder).vocab_size
    with runtime.start("cpu", timeout_s=60):
        chunk = chunk_of(model)
        with torch.no_grad():
            logits = run_row(chunk, to_device(row, torch.device("cpu")), with_labels=False)[0].numpy()
        written = dict(hf_tensors(chunk.module, model, vocab))
        count = sum(weight.numel() for weight in chunk.module.encoder.parameters())
    assert np.abs(logits[~row.padding_mask, :vocab] - transformers_logits(model, sequences)).max() < 1e-5
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, tmp_path / "model.safetensors")
    # Experts of qwen3_vl_moe are stacked as in published files here, and turned in those of newer transformers.
    with HfWeights(folder) as theirs, HfWeights(tmp_path) as own:
        assert own.names == {name for name in theirs.names if not name.startswith(model.left_out)}
        for tensor in own.names:
            assert own.shape(tensor) == theirs.shape(tensor)
            assert torch.equal(own.rows(tensor, 1, 3), theirs.rows(tensor, 1, 3))
            assert torch.equal(own.rows(tensor), theirs.rows(tensor))
            if len(own.shape(tensor)) == 2:
                assert torch.equal(own.columns(tensor, 1, 3), theirs.columns(tensor, 1, 3))
    media, values = read_encoder(model.encoder)
    assert count == media.count(values, model.hidden_size)


def test_layers_that_compute_themselves_again_give_the_encoder_the_same_gradients(folders) -> None:
    model = replace(model_of(folders["qwen3_vl"]), train_encoder=True)
    row, found = row_of(made_sequences(model.encoder), _rules_of(model.encoder).features), []
    for recompute in ("none", "full"):
        with runtime.start("cpu", timeout_s=60):
            chunk = chunk_of(replace(model, recompute=recompute))
            run_row(chunk.train(), to_device(row, torch.device("cpu"))).sum().backward()
            found.append({name: weight.main_grad for name, weight in chunk.module.named_parameters()})
    plain, again = found
    for name, gradient in plain.items():
        assert (gradient - again[name]).norm() <= 1e-5 * gradient.norm(), name
    assert plain["encoder.visual.deepstack_merger_list.1.linear_fc2.weight"].norm() > 0


def test_positions_of_a_row_are_those_of_transformers_for_each_sequence(folders) -> None:
    import transformers

    model = model_of(folders["qwen2_5_vl"])
    plain = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(model.init_from)
    sequences, rules = made_sequences(model.encoder), _rules_of(model.encoder)
    row = row_of(sequences, rules.grids)
    ranks = [to_device(row, torch.device("cpu"), cp_size=2, cp_rank=rank).packed_seq_params.grid for rank in (0, 1)]
    whole = to_device(row, torch.device("cpu")).packed_seq_params.grid
    for rank, own in enumerate(ranks):
        kept = context_parallel_indices(row.cu_seqlens_padded, cp_size=2, cp_rank=rank)
        assert torch.equal(own, whole[:, kept])
    for one, start in zip(sequences, row.cu_seqlens_padded.tolist(), strict=False):
        ids, places = (
            torch.from_numpy(one.input_ids).long()[None, :-1],
            whole[:, start : start + len(one.input_ids) - 1],
        )
        if not one.media:
            assert torch.equal(places, torch.arange(ids.shape[1]).expand(3, -1))
            continue
        grids, kinds = torch.from_numpy(rules.grids(one.media)["image_grid_thw"]), (ids == 299).int()
        assert len(set(grids.flatten().tolist())) > 2
        assert torch.equal(places, plain.model.get_rope_index(ids, kinds, image_grid_thw=grids)[0][:, 0])
    text = build_thd_batch([sequences[1]])
    assert to_device(text, torch.device("cpu")).packed_seq_params.grid is None


@pytest.mark.parametrize("name", NAMES)
def test_the_config_of_an_export_is_read_as_the_same_model(folders, tmp_path, name) -> None:
    stored = read_hf_config(folders[name])
    config = to_hf_config(ModelConfig(**stored.settings, max_sequence_length=64), vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hf_config(tmp_path).settings == stored.settings


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_tied_embeddings_are_read_and_written_where_transformers_reads_them(folders, tmp_path, name) -> None:
    import transformers

    config = json.loads((folders[name] / "config.json").read_text())
    architecture = getattr(transformers, config["architectures"][0])
    for outer, inner in itertools.product((True, False), repeat=2):
        text = {**config["text_config"], "tie_word_embeddings": inner}
        (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": outer, "text_config": text}))
        settings = read_hf_config(tmp_path).settings
        exported = to_hf_config(ModelConfig(**settings, max_sequence_length=64), vocab_size=300)
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "config.json").write_text(json.dumps(exported))
        for folder in (tmp_path, tmp_path / "out"):
            made = architecture(transformers.AutoConfig.from_pretrained(folder))
            is_tied = made.lm_head.weight is made.model.language_model.embed_tokens.weight
            assert is_tied == settings["tie_embeddings"], (outer, inner, folder)


@pytest.mark.submission
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_an_export_of_a_run_on_images_generates_in_transformers(folders, tmp_path, name) -> None:
    import transformers

    data = make_dataset(tmp_path / "data", num_packs=4, encoder=model_of(folders[name]).encoder)
    settings = [f"model.init_from={folders[name]}", "model.max_sequence_length=512", "model.train_encoder=true"]
    settings += ["loader.global_batch_size=4", "trainer.steps=1", "trainer.epochs=null", "trainer.device=cpu"]
    settings += ["loader.num_workers=0", "schedule=as_packed", "schedule.max_tokens_per_rank=256"]
    run_here(sft, SftConfig, [f"data.path={data}", f"run_dir={tmp_path}/run", "optimizer.lr=0.01", *settings])
    (step,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    sizes = [len(one.data) for pack in open_dataset(data / "train") for one in pack.media]
    assert step.rank_media_bytes == [sum(sizes)]
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    kind = getattr(transformers, read_encoder(model_of(folders[name]).encoder)[0].architecture)
    trained, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"] | info["mismatched_keys"]
    first, before = trained.state_dict(), kind.from_pretrained(folders[name]).state_dict()
    moved = {key.split(".")[1] for key in first if not torch.equal(first[key], before[key])}
    assert moved >= {"visual", "language_model"}
    (one,) = (one for one in made_sequences(model_of(folders[name]).encoder) if len(one.media) == 2)
    ids = torch.from_numpy(one.input_ids).long()[None]
    arrays = tensors(_rules_of(model_of(folders[name]).encoder).features(one.media))
    made = trained.generate(
        input_ids=ids, mm_token_type_ids=(ids == 299).int(), max_new_tokens=3, do_sample=False, **arrays
    )
    assert made.shape[1] == ids.shape[1] + 3


@pytest.mark.parametrize(
    ("name", "part", "value", "why"),
    [
        ("llava", "vision_config", {"image_size": 28}, "tokens=4, but the encoder has 9"),
        ("qwen2_audio", "audio_config", {"num_mel_bins": 24}, "feature_size=24, but the encoder has "),
        ("qwen2_5_vl", "vision_config", {"patch_size": 6}, "patch_size=6, but the encoder has "),
    ],
)
def test_media_that_were_prepared_for_an_encoder_of_another_size_are_refused(
    folders, tmp_path, name, part, value, why
) -> None:
    encoder = json.loads(model_of(folders[name]).encoder)
    encoder[part] |= value
    data = make_dataset(tmp_path / "data", num_packs=4, encoder=json.dumps(encoder))
    settings = [f"model.init_from={folders[name]}", "model.max_sequence_length=512", "trainer.device=cpu"]
    with pytest.raises(ConfigError, match=why):
        run_here(sft, SftConfig, [f"data.path={data}", f"run_dir={tmp_path}/run", "trainer.steps=1", *settings])


def test_a_published_config_that_leaves_out_defaults_is_read(tmp_path) -> None:
    text = {"model_type": "qwen2", "intermediate_size": 11008, "max_position_embeddings": 8192, "vocab_size": 156032}
    audio = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    audio |= {"num_mel_bins": 128, "max_source_positions": 1500, "model_type": "qwen2_audio_encoder"}
    values = {"model_type": "qwen2_audio", "audio_token_index": 151646, "audio_config": audio, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    stored = read_hf_config(tmp_path)
    assert (stored.settings["hidden_size"], stored.settings["num_layers"], stored.vocab_size) == (4096, 32, 156032)
    media, kept = read_encoder(stored.settings["encoder"])
    # Of the published weights: the tower has 636,968,960 and the projector 5,246,976.
    assert media.count(kept, 4096) == 636_968_960 + 5_246_976


def test_a_published_config_with_the_text_models_values_beside_the_encoders_is_read(tmp_path) -> None:
    values = {"model_type": "qwen2_5_vl", "image_token_id": 151655, "video_token_id": 151656, "vocab_size": 152064}
    values |= {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    values |= {"num_key_value_heads": 4, "max_position_embeddings": 128000, "rope_theta": 1000000.0}
    values |= {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": True}
    values |= {"use_sliding_window": False, "sliding_window": 32768, "vision_start_token_id": 151652}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3}
    values["vision_config"] = {**vision, "out_hidden_size": 3584, "window_size": 112, "patch_size": 14}
    (tmp_path / "config.json").write_text(json.dumps(values))
    stored = read_hf_config(tmp_path)
    model = ModelConfig(**stored.settings, max_sequence_length=4096)
    assert (model.family, model.num_layers, model.tie_embeddings, model.rotary_base) == ("qwen2", 28, True, 1_000_000)
    assert model.rope_axes == ((0,) * 16 + (1,) * 24 + (2,) * 24) * 2
    media, kept = read_encoder(model.encoder)
    # As transformers builds it.
    with torch.device("meta"):
        assert media.count(kept, 3584) == 676_550_144 == sum(one.numel() for one in MediaEncoder(model).parameters())
    with pytest.raises(ConfigError, match="its mrope_section has 64 numbers for heads of 64"):
        replace(model, head_dim=64)


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_a_text_model_leaves_out_is_that_of_transformers_or_refused(folders, tmp_path, name) -> None:
    from transformers import AutoConfig

    whole = json.loads((folders[name] / "config.json").read_text())
    # With those that differ in size, weights do not fit.
    sizes = {"vocab_size", "intermediate_size", "hidden_size", "max_position_embeddings", "num_hidden_layers"}
    for value in whole["text_config"].keys() - sizes:
        text = {key: other for key, other in whole["text_config"].items() if key != value}
        (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": text}))
        try:
            found = read_hf_config(tmp_path).settings
        except HarnessError:
            continue
        (tmp_path / "config.json").write_text(json.dumps(AutoConfig.from_pretrained(tmp_path).to_dict()))
        made = read_hf_config(tmp_path).settings
        assert (value, made | {"encoder": ""}) == (value, found | {"encoder": ""})
        assert rope_axes(json.loads(made["encoder"])) == rope_axes(json.loads(found["encoder"]))
    for change, why in (
        ({"quantization_config": {"quant_method": "fp8"}}, "weights quantized by fp8 are not supported"),
        ({"text_config": {**whole["text_config"], "is_causal": False}}, "is_causal False is not supported"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(whole | change))
        with pytest.raises(HarnessError, match=why):
            read_hf_config(tmp_path)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_images_are_those_of_transformers_whatever_config_json_says(folders, tmp_path, name) -> None:
    whole = json.loads((folders[name] / "config.json").read_text())
    right = model_of(folders[name]).rope_axes
    rope = whole["text_config"]["rope_parameters"]
    for interleaved in (True, False, None):
        rope["mrope_interleaved"] = interleaved
        (tmp_path / "config.json").write_text(json.dumps(whole))
        assert model_of(tmp_path).rope_axes == right
    del rope["mrope_section"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(HarnessError, match="has no 'mrope_section'"):
        read_hf_config(tmp_path)


AUDIO = {"d_model": 8, "num_mel_bins": 8, "max_source_positions": 8, "encoder_layers": 1, "encoder_ffn_dim": 8}
DROPPED = {"model_type": "qwen2_audio", "audio_token_index": 1}
DROPPED["audio_config"] = AUDIO | {"dropout": 0.1, "layerdrop": 0.2}
NO_ENCODER = "it is not the config.json of an encoder"


@pytest.mark.parametrize(
    ("name", "of_encoder", "changed", "why"),
    [
        ("qwen3_vl", {"mrope_section": None}, {}, NO_ENCODER),
        ("qwen3_vl", {"mrope_section": [1, "x"]}, {}, NO_ENCODER),
        ("qwen3_vl", {"vision_config": 5}, {}, NO_ENCODER),
        ("qwen3_vl", {"vision_config": {}}, {}, NO_ENCODER),
        ("qwen2_audio", DROPPED, {}, "its dropout 0.1 and layerdrop 0.2 is not supported"),
        ("qwen2_audio", {}, {"encoder": "{}"}, NO_ENCODER),
        ("qwen2_audio", {}, {"family": "llama"}, "text models of qwen2_audio are of the family qwen2"),
        ("qwen2_audio", {}, {"train_encoder": True, "lora_rank": 4}, "only adapters of the text model"),
        ("qwen2_audio", {}, {"fp8": "blockwise"}, "FP8 is not supported with an encoder"),
        ("qwen2_audio", {}, {"encoder": None, "train_encoder": True}, "there is no encoder"),
    ],
)
def test_settings_that_no_encoder_trains_with_are_refused(folders, name, of_encoder, changed, why) -> None:
    model = model_of(folders[name])
    values = json.dumps(json.loads(model.encoder) | of_encoder)
    with pytest.raises(ConfigError, match=why):
        replace(model, **{"encoder": values, **changed})


def test_more_features_than_placeholder_tokens_are_refused(folders) -> None:
    model = model_of(folders["qwen2_audio"])
    sequences, rules = made_sequences(model.encoder), _rules_of(model.encoder)
    row = build_thd_batch(sequences)
    media = row_media([one.media for one in sequences], rules.features)
    short = replace(row, media=replace(media, tokens=media.tokens - 1))
    encoder = MediaEncoder(model)
    encoder.row = to_device(short, torch.device("cpu")).packed_seq_params.media
    with pytest.raises(HarnessError, match=r"the encoder returns \d+ features for \d+ placeholder tokens"):
        encoder.merge(torch.zeros(len(row), 1, model.hidden_size))


@pytest.mark.parametrize("name", NAMES)
def test_the_features_of_a_medium_do_not_depend_on_the_others_of_its_row(folders, name) -> None:
    model = model_of(folders[name])
    encoder, rules = MediaEncoder(model), _rules_of(model.encoder)
    rng, (kind,) = np.random.default_rng(4), rules.tokens
    with torch.no_grad():  # biases, which are zero at first, are what padding would bring in
        for weight in encoder.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
        media = [Medium(kind, 0, 1, _sound(rng) if kind == "audio" else _image(rng)) for _ in range(4)]
        together = encoder(**tensors(rules.features(media)))
        alone = torch.cat([encoder(**tensors(rules.features([one]))) for one in media])
    assert (together - alone).abs().max() < 1e-5


def wider(encoder: str) -> str:
    """Return `model.encoder` with so wide layers that what does not grow with them is little."""
    values = json.loads(encoder)
    (part,) = (name for name in ("audio_config", "vision_config") if name in values)
    names = {256: ("d_model", "hidden_size"), 1024: ("encoder_ffn_dim", "intermediate_size"), 4: ("num_heads",)}
    names |= {6: ("encoder_layers", "num_hidden_layers", "depth"), 64: ("downsample_hidden_size",)}
    names[4] += ("encoder_attention_heads", "num_attention_heads")
    values[part] |= {name: size for size, some in names.items() for name in some if name in values[part]}
    return json.dumps(values)


@pytest.mark.submission
@pytest.mark.parametrize("name", NAMES)
def test_the_work_of_an_encoder_is_what_torch_counts_and_keeps(folders, name) -> None:
    """By the numbers of placeholder tokens alone, of media of several sizes."""
    model = model_of(folders[name])
    model = replace(model, encoder=wider(model.encoder), train_encoder=True)
    encoder, rules = MediaEncoder(model), _rules_of(model.encoder)
    (kind,), own = rules.tokens, {weight.untyped_storage().data_ptr() for weight in encoder.parameters()}
    sizes = (15_000, 16_000, 100_000) if rules.family == "qwen3_omni_moe" else (9_000, 16_000)
    made = map(sound, sizes) if kind == "audio" else (picture(*size) for size in ((30, 40), (60, 60), (90, 20)))
    for data in made:
        tokens = rules.count_tokens(kind, measure(kind, data))
        arrays = tensors(rules.features([Medium(kind, 0, tokens, data)]))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            encoder(**arrays)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept |= {} if storage.data_ptr() in own else {storage.data_ptr(): storage.nbytes() // 4}
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = encoder(**arrays)
        work = encoder_work(model.encoder, model.hidden_size, np.array([float(tokens)]))
        assert work.flops[0] == pytest.approx(counter.get_total_flops(), rel=0.03)
        assert work.kept[0] == pytest.approx(sum(kept.values()), rel=0.1)
        assert 0 < work.once[0] < work.kept[0]
        del features


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def test_a_preset_names_the_sizes_of_an_encoder_and_the_weights_have_all_values() -> None:
    stored = HfModel(
        {"encoder": '{"a": 1, "b": {"c": 2, "d": 3}}', "num_attention_heads": 2, "hidden_size": 8}, 300, 64
    )
    values = {"encoder": '{"b": {"c": 2}}', "num_attention_heads": None, "hidden_size": None}
    set_by = {"encoder": "model=preset"}
    assert complete_model(values, stored, set_by, where="X")["encoder"] == stored.settings["encoder"]
    with pytest.raises(ConfigError, match="do not match its weights"):
        complete_model({**values, "encoder": '{"b": {"c": 4}}'}, stored, set_by, where="X")
