"""The command `harness sft`: from a model and chats to a trained model, by the commands that also run alone."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness.arguments import quote_value
from harness.cli.settings import argument, require_training
from harness.errors import ConfigError
from harness.launch.local import run_command
from harness.mistakes import KnownSettings, suggest_setting, word_of
from harness.plan import SftConfig
from harness.prep import PrepareConfig
from harness.printing import count_of, escape_markdown, print_line, redact_all
from harness.settings import CONFIGS
from harness.storage import write_atomically

end_to_end_app = typer.Typer()
# Beginning of the names of exported models.
_MODEL = "model-step-"
# Settings that follow from MODEL, CHATS and OUT.
_CHOSEN = {
    "source.path": "CHATS names the chats",
    "source.mix": "CHATS itself may be source.mix=[...]",
    "data.path": "the dataset is OUT/data",
    "model.init_from": "MODEL names the weights",
    "run_dir": "the run is OUT/run",
    "runs": "the run is OUT/run",
    "resume": "the run resumes by itself",
    "preview": "`harness prepare source.path=CHATS tokenizer.name=MODEL --preview 3` shows chats",
}


@end_to_end_app.command(context_settings={"ignore_unknown_options": True})
def sft(
    model: Annotated[str, argument("MODEL", "weights and tokenizer: folder, or name on the Hub")],
    chats: Annotated[str, argument("CHATS", "file, folder, glob, bucket URI, Hub dataset or source.mix=[...]")],
    arguments: Annotated[
        list[str] | None, argument("[OUT] [KEY=VALUE]...", "folder of the results; settings of prepare and train sft")
    ] = None,
) -> None:
    """Prepare chats, plan, train and export in one command.

    For example: `harness sft Qwen/Qwen3-0.6B chats.jsonl out trainer.epochs=2 optimizer.lr=1e-5 data.pack_size=8192`

    Runs `harness prepare`, `plan`, `train sft` and `export`, and prints each command. OUT (by default runs/MODEL-CHATS)
    contains the dataset, the run, the exported model and a report. After an interruption, run the same command again.

    `harness train sft --help` and `harness prepare --help` list the settings.
    """
    out, settings = _find_out(model, chats, arguments or [])
    _refuse_other_models(out)
    preparing, training = _divide(model, chats, out, settings)
    require_training("training")
    gpus = _check(preparing, training)
    commands = [["prepare", *preparing]]
    _run(commands[-1])
    if gpus:
        layout, planned = plan_layout(training, gpus)
        training += layout
        commands.append(planned)
        _run(planned)
    commands.append(["train", "sft", *training, "resume=auto"])
    _run(commands[-1])
    run = out / "run"
    if not (step := _newest_step(out)):
        raise ConfigError("the run has no checkpoint", where=str(run), fix="train one step or more")
    exported = out / f"{_MODEL}{step}"
    commands.append(["export", str(run), str(exported)])
    if exported.exists():
        print_line(f"{exported} is already exported.")
    else:
        _run(commands[-1])
    report, place = out / "report.md", shlex.quote(str(exported.resolve()))
    write_atomically(report, _report(out, exported, commands).encode())
    print_line(f"report {report}; to chat with the model: `transformers serve` and `transformers chat {place}`")


def _newest_step(out: Path) -> int:
    """Return the step of the newest whole checkpoint of the run; 0 if there is none."""
    from harness.train.checkpoints import CHECKPOINTS, read_progress, whole_checkpoints

    newest = whole_checkpoints(out / "run" / CHECKPOINTS)[-1:]
    return read_progress(newest[0]).step if newest else 0


def _refuse_other_models(out: Path) -> None:
    """Raise ConfigError for a model of a later step than the run has, which another run has trained."""
    from harness.train.checkpoints import CHECKPOINTS, list_checkpoints

    # Whole or not: an older one takes the place of one that is damaged.
    done = max((int(one.name.rpartition("-")[2]) for one in list_checkpoints(out / "run" / CHECKPOINTS)), default=0)
    for model in out.glob(f"{_MODEL}*"):
        step = model.name.removeprefix(_MODEL)
        if step.isdecimal() and int(step) > done:
            what = f"the model of step {step} is not of the run, which has {count_of(done, 'step')}"
            raise ConfigError(what, where=str(model), fix="remove it, or choose another OUT")


def _find_out(model: str, chats: str, arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the folder of the results, named by its argument or after model and chats, and the settings."""
    for name, text in (("MODEL", model), ("CHATS", chats)):
        is_mix = name == "CHATS" and text.startswith("source.mix=")
        if ("=" in text.partition("/")[0] and not is_mix) or text.startswith("-"):
            fix = "harness sft MODEL CHATS [OUT] [KEY=VALUE]..."
            raise ConfigError(f"{text!r} is in the place of {name}", where="harness sft", fix=fix)
    if Path(model).is_file() and not Path(chats).is_file():
        what = "the arguments are reversed: MODEL is a file"
        raise ConfigError(what, where=model, fix=f"harness sft {chats} {model}")
    known = {*KnownSettings("", PrepareConfig, []).types, *KnownSettings("", SftConfig, []).types}
    for text, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if text.startswith("-") and text != "--overwrite":
            key, equals, value = text.partition("=")
            value = following if not equals and "=" not in following and following[:1] != "-" else value
            hint = suggest_setting(word_of(key), value, known)
            fix = f"{hint}settings are key=value; `harness prepare`, `plan` and `train sft` take flags"
            raise ConfigError(f"harness sft has no flag {key}", where=text, fix=fix)
    named = [text for text in arguments if "=" not in text and not text.startswith("-")]
    if len(named) > 1:
        fix = "one folder, and settings as key=value"
        raise ConfigError(f"{' and '.join(named)} are given in the place of OUT", where="harness sft", fix=fix)
    names = (model, "mix" if is_mix else chats)
    default = Path("runs") / "-".join(Path(text.rstrip("/")).name.split(".")[0] or "chats" for text in names)
    return Path(named[0]) if named else default, [text for text in arguments if text not in named]


def _divide(model: str, chats: str, out: Path, settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide settings between the two recipes, which share no name; raise ConfigError for those of the arguments."""
    known = KnownSettings("harness prepare", PrepareConfig, [CONFIGS])
    source = chats if chats.startswith("source.mix=") else f"source.path={quote_value(chats)}"
    preparing, training = [source, f"tokenizer.name={quote_value(model)}"], [f"model.init_from={quote_value(model)}"]
    for text in ("data.overwrite=true" if text == "--overwrite" else text for text in settings):
        key, _, value = text.partition("=")
        if (why := _CHOSEN.get(key)) is not None:
            raise ConfigError(f"harness sft sets {key} itself", where=text, fix=f"omit it: {why}")
        is_file = key in known.groups and value in known.files(key)
        (preparing if key in known.types or is_file else training).append(text)
    data, run = (f"{name}={quote_value(str(out / last))}" for name, last in (("data.path", "data"), ("run_dir", "run")))
    return [*preparing, data], [*training, data, run]


def _check(preparing: list[str], training: list[str]) -> list[int]:
    """Compose the settings of both recipes before the first stage runs; return the bytes of each GPU to train on.

    Adds the number of ranks, and that packs are no longer than the model's positions, where they are not set.
    """
    from harness.config import compose_config, compose_run

    run = compose_run("sft", training, also=KnownSettings("", PrepareConfig, [CONFIGS]).types).config
    model = Path(str(run.model.init_from))
    if model.is_dir() and next(model.glob("*.safetensors"), None) is None:
        fix = "write them with save_pretrained(..., safe_serialization=True)"
        raise ConfigError("the folder has no *.safetensors", where=str(model), fix=fix)
    prepare = compose_config("prepare", PrepareConfig, preparing)
    positions = run.model.max_sequence_length
    is_sized = any(text.partition("=")[0] in ("data.pack_size", "data") for text in preparing)
    if not is_sized and prepare.data.pack_size > positions:
        preparing.append(f"data.pack_size={positions}")
    gpus: list[int] = []
    if run.trainer.device != "cpu":
        import torch

        count = run.parallel.ranks or torch.cuda.device_count()
        gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())][:count]
    if not run.parallel.ranks:
        training.append(f"parallel.ranks={len(gpus) or 1}")
    return gpus


def plan_layout(settings: Sequence[str], gpus: Sequence[int]) -> tuple[list[str], list[str]]:
    """Return the settings of the fastest layout for GPUs of these bytes of memory, and the command that plans it."""
    from harness.config import compose_run
    from harness.plan.search import search_layouts
    from harness.plan.work import Machine

    keys = {text.partition("=")[0] for text in settings}
    layout: list[str] = []
    if not any(key.split(".")[0] == "parallel" for key in keys - {"parallel.ranks"}):
        run = compose_run("sft", settings).config
        found = search_layouts(run, machine=Machine(ranks=max(len(gpus), 1)), packs=None, gpu_bytes=min(gpus))
        # Where none fits, the plan of the settings says how much is missing.
        layout = [text for text in (found.fitting or [found.smallest])[0].overrides if text.split("=")[0] not in keys]
    return layout, ["plan", "sft", *settings, *layout, f"gpu_gib={min(gpus) / 2**30:.1f}"]


def _run(command: Sequence[str]) -> None:
    """Run a command of `harness`; if it fails, end with its exit code."""
    print_line(f"$ {shlex.join(['harness', *redact_all(list(command))])}")
    code = run_command([sys.executable, "-m", "harness", *command])
    if code:
        how = "correct the error or choose another OUT, then run it" if code == 2 else "to continue, run the command"
        if code == 1 and command[0] == "plan":
            how = "choose settings with which the run fits, then run the command"
        print_line(f"`harness {command[0]}` ended with {code}; {how} again", file=sys.stderr)
        raise typer.Exit(code)


def _report(out: Path, exported: Path, commands: Sequence[Sequence[str]]) -> str:
    """Return a page: data, losses, the model, and the commands that ran."""
    from harness.train import METRICS_FILE, read_metrics

    steps = read_metrics(out / "run" / METRICS_FILE)
    found = [steps[0].initial_losses.get("validation"), *(step.validation_loss for step in steps)]
    validated = [loss for loss in found if loss is not None]
    losses: dict[str, list[float]] = {
        "training loss": [step.loss for step in (steps[0], steps[-1])],
        "validation loss": [*validated[:1], *validated[1:][-1:]],
    }
    lines = [
        f"# {escape_markdown(out.name)}\n",
        "![loss](run/loss.png)\n",
        *(f"- {name}: {' to '.join(f'{loss:.4f}' for loss in values)}" for name, values in losses.items() if values),
        "- [dataset](data/report.md)",
        f"- [run](run/report.md): {count_of(steps[-1].step, 'step')}",
        f"- [model]({exported.name}/README.md)",
        "",
        "```shell",
        *(shlex.join(["harness", *redact_all(list(command))]) for command in commands),
        "```\n",
    ]
    return "\n".join(lines)
