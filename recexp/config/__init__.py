"""Pydantic models of every YAML file: model, data, training, measurement, experiment.

An unknown key is an error that names the nearest known one; an impossible value is an error that names the limit.
``load_config`` reads one file of any kind (its ``kind`` key says which), follows paths to other files, and applies
``a.b=c`` overrides; ``to_yaml`` writes the resolved configuration back, defaults included, because defaults drift.
"""

from recexp.config.base import cache_dir
from recexp.config.data import DataConfig, SyntheticConfig, TaskConfig, TrainingConfig
from recexp.config.experiment import (
    Bucket,
    CacheConfig,
    DifferenceConfig,
    ExperimentConfig,
    GraphConfig,
    MeasureConfig,
    ReplayConfig,
)
from recexp.config.load import load_config
from recexp.config.model import ModelConfig
from recexp.config.serving import ServingConfig
from recexp.config.sweep import SweepConfig

__all__ = [
    "Bucket",
    "CacheConfig",
    "DataConfig",
    "DifferenceConfig",
    "ExperimentConfig",
    "GraphConfig",
    "MeasureConfig",
    "ModelConfig",
    "ReplayConfig",
    "ServingConfig",
    "SweepConfig",
    "SyntheticConfig",
    "TaskConfig",
    "TrainingConfig",
    "cache_dir",
    "load_config",
]
