"""Rescale the channels of the model before it is profiled, so that the profile is of what will be quantised."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import torch

from reflux.components.algorithms.equalization import ChannelPower, equalize, equalizing_scales
from reflux.components.algorithms.low_bit import watching_sites
from reflux.components.profile_schemas import EQUALIZATION

from .config import ProfileKvConfig
from .readings import Rows, readings


def equalize_channels(model: Any, tokenizer: Any, rows: Rows, config: ProfileKvConfig) -> pa.Table:
    """Change `model` in place; the table of EQUALIZATION. ValueError for a model whose channels cannot be rescaled."""
    power = ChannelPower()
    with torch.no_grad(), watching_sites(model, power.see):
        for reading in readings(model, tokenizer, rows, config.batch_traces, "traces, for the channels"):
            power.begin(reading.mask_BT)
            reading.output()
    rms = power.rms()
    scales = equalizing_scales(model, rms, config.equalization_power)
    try:
        equalize(model, scales)
    except ValueError as error:
        raise ValueError(
            f"profile_kv.equalization_power {config.equalization_power}: {error}; 0 leaves it as it is"
        ) from None
    written = [{"site": site, "rms": rms[site].tolist(), "scale": scales[site].tolist()} for site in scales]
    return pa.Table.from_pylist(written, EQUALIZATION)
