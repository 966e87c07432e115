"""Write the files of a bundle from a trained student, the same rounding and nothing else."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

import reflux.components
import reflux.kernels
from reflux.components.algorithms.low_bit import Scheme
from reflux.components.bundles import policy_table
from reflux.components.bundles.bundle import compressed_tensors_config, deployed_state, quant_config, quantized_bits
from reflux.components.bundles.bundle_digests import digests

RUNTIME = (
    "components/__init__.py",
    "components/canonical.py",
    "components/content_digest.py",
    "components/bundles/__init__.py",
    "components/bundles/bundle.py",
    "components/bundles/bundle_digests.py",
    "components/bundles/outliers.py",
    "components/bundles/packed_linear.py",
    "components/bundles/policy_table.py",
    "components/bundles/transformers_bundle.py",
    "components/algorithms/__init__.py",
    "components/algorithms/coded_tables.py",
    "components/algorithms/cpu_kernels.py",
    "components/algorithms/hadamard.py",
    "components/algorithms/kv_cache.py",
    "components/algorithms/kv_forms.py",
    "components/algorithms/layer_bits.py",
    "components/algorithms/low_bit.py",
    "components/algorithms/low_bit_embedding.py",
    "components/algorithms/policies.py",
    "components/algorithms/quantizers.py",
    "components/algorithms/rope_tables.py",
    "components/algorithms/same_function.py",
    "components/algorithms/slot_cache.py",
    "kernels/__init__.py",
    "kernels/dual_scale_quant/__init__.py",
    "kernels/dual_scale_quant/kernel.py",
    "kernels/dual_scale_quant/reference.py",
    "components/serve/__init__.py",
    "components/serve/served_bundle.py",
    "components/serve/vllm_linear.py",
    "components/serve/vllm_plugin.py",
)
"""What loading a bundle needs of reflux, copied as it is: one definition of the deployed forward, wherever it runs."""

DESCRIBED = {
    "METADATA": "Metadata-Version: 2.1\nName: reflux-bundle\nVersion: 1\n",
    "entry_points.txt": "[vllm.general_plugins]\nreflux = reflux.components.serve.vllm_plugin:register\n",
}
"""Makes runtime/ a distribution whose plugin vLLM finds once it is on the path; pyproject.toml has the same entry."""

SCRIPTS = ("calibrate.py", "fallback.py")
REQUIREMENTS = ("torch", "transformers", "safetensors")
ALONE = {"load_with": "reflux.components.bundles.transformers_bundle.low_bit_config"}
"""Without `quant_method`, which transformers refuses; a method that it does not know it would leave out, and begin with
random weights.
"""


def write_bundle(
    folder: Path,
    student: Any,
    tokenizer: Any,
    scheme: Scheme,
    *,
    thresholds: dict[str, float],
    fallback_share: float,
    base_digest: str,
    card: str,
) -> None:
    """Fill `folder` with a bundle of `student` (the trained forward, with master weights), which was trained from the
    model of that digest.
    """
    student.config.save_pretrained(folder)
    if quantized_bits(student, scheme) or scheme.rounds_embedding:
        config = json.loads((folder / "config.json").read_text())
        # a runtime that does not know reflux would not turn the inputs of down_proj, or begin with a random embedding
        alone = scheme.rotates or scheme.rounds_embedding
        config["quantization_config"] = ALONE if alone else compressed_tensors_config(student, scheme)
        (folder / "config.json").write_text(_json(config))
    # not save_pretrained, which refuses what some published models have: a temperature beside do_sample false
    (folder / "generation_config.json").write_text(student.generation_config.to_json_string() + "\n")
    tokenizer.save_pretrained(folder)
    save_file(deployed_state(student, scheme), folder / "model.safetensors", metadata={"format": "pt"})
    description = quant_config(student, scheme, thresholds, fallback_share)
    description |= {"files": digests(folder), "full_precision": base_digest}
    (folder / "quant_config.json").write_text(_json(description))
    if student.policy is not None:
        (folder / "policy_table.bin").write_bytes(policy_table.encode(student.policy))
    (folder / "README.md").write_text(card)
    (folder / "requirements.txt").write_text(
        "".join(f"{name}=={version(name).partition('+')[0]}\n" for name in REQUIREMENTS)
    )
    for script in SCRIPTS:
        shutil.copyfile(Path(__file__).parent / "bundle_files" / script, folder / script)
    roots = {"components": reflux.components, "kernels": reflux.kernels}
    for name in RUNTIME:
        root, _, path = name.partition("/")
        target = folder / "runtime" / "reflux" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(roots[root].__path__[0]) / path, target)
    distribution = folder / "runtime" / "reflux_bundle-1.dist-info"
    distribution.mkdir()
    for name, text in DESCRIBED.items():
        (distribution / name).write_text(text)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
