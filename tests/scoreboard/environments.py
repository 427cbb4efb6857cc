"""The environments of the trainers on the scoreboard, in the cache folder of those of the integrations."""

from __future__ import annotations

from tests.integrations.environments import ENVIRONMENTS as INTEGRATIONS
from tests.integrations.environments import PEERS, TORCH, Environment

_TRL = f"trl=={PEERS['trl']}"

ENVIRONMENTS = {
    one.name.removeprefix("scoreboard-"): one
    for one in (
        Environment(
            "scoreboard-transformers", (TORCH, "numpy", "transformers==5.24.0", "accelerate==1.15.0", "jinja2")
        ),
        Environment(
            "scoreboard-trl", (TORCH, "numpy", _TRL, "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0")
        ),
        # Without what needs CUDA, or only serves, plots and downloads.
        Environment(
            "scoreboard-llamafactory",
            (
                *(TORCH, "numpy", "transformers==5.6.0", "accelerate==1.11.0", "datasets==4.0.0", "peft==0.18.1"),
                *("trl==0.24.0", "torchdata==0.11.0", "modelscope", "omegaconf", "einops", "fire", "matplotlib"),
                *("sentencepiece", "tiktoken", "scipy", "pydantic", "av", "hf-transfer", "jinja2", "tyro<0.9"),
            ),
            alone=("llamafactory==0.9.5",),
        ),
        Environment(
            "scoreboard-ms-swift",
            (
                *(TORCH, "numpy", "transformers==5.19.0", "accelerate==1.15.0", "datasets==4.8.4", "peft==0.20.0"),
                *("trl==0.29.0", "modelscope", "addict", "aiohttp", "binpacking", "charset-normalizer", "dacite"),
                *("einops", "fastapi", "importlib-metadata", "json-repair", "matplotlib", "nltk", "openai", "pillow"),
                *("pandas", "rouge", "scipy", "sentencepiece", "simplejson", "sortedcontainers", "tensorboard"),
                *("tiktoken", "uvicorn", "zstandard", "attrdict", "jinja2"),
            ),
            alone=(f"ms-swift=={PEERS['ms-swift']}",),
        ),
        Environment(
            "scoreboard-axolotl",
            (
                *(TORCH, "numpy", "transformers==5.16.1", "accelerate==1.13.0", "datasets==4.8.4", "peft==0.20.0"),
                *("trl==1.9.0", "tokenizers==0.23.1", "huggingface_hub==1.17.0", "packaging==26.0", "pydantic==2.12.5"),
                *("addict", "fire", "PyYAML==6.0.3", "requests", "einops", "colorama", "numba", "typer", "evaluate"),
                *("scipy", "art", "python-dotenv==1.0.1", "zstandard", "langdetect", "immutabledict", "s3fs"),
                *("schedulefree==1.4.1", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "jinja2"),
                *("mistral-common==1.11.5", "optimum==1.16.2", "sentencepiece", "kernels<0.17", "tensorboard", "wandb"),
                *("posthog==6.7.11", "fastcore", "trackio", "torchao==0.17.0", "triton==3.7.0", "bitsandbytes==0.50.2"),
            ),
            alone=("axolotl==0.19.0",),
        ),
        Environment(
            "scoreboard-automodel",
            (
                *(TORCH, "numpy", "transformers==5.18.0", "datasets==5.2.0", "accelerate==1.15.0", "pyyaml"),
                *("torchdata", "torchao==0.17.0", "tiktoken", "jinja2", "opencv-python-headless", "mistral-common"),
            ),
            alone=(f"nemo-automodel=={PEERS['nemo-automodel']}", "megatron-fsdp==0.5.0", "flashoptim==0.1.3", _TRL),
        ),
        # All of it is there already, in the environment of `.ci/versions`.
        Environment("scoreboard-megatron-core", ("megatron-core==0.19.2", "datasets", "transformers"), newer=True),
    )
}
# A loop on accelerate needs what transformers needs.
ENVIRONMENTS["accelerate"] = ENVIRONMENTS["transformers"]
ENVIRONMENTS["torchtitan"] = INTEGRATIONS["torchtitan"]
ENVIRONMENTS["megatron-bridge"] = INTEGRATIONS["megatron_bridge"]


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:] or ENVIRONMENTS:
        ENVIRONMENTS[name].make()
