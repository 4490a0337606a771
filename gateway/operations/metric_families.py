"""Building Prometheus metric families, and the deprecated names that some of them had.

A renamed metric is exposed under both names for one version. The old family has the same values; its HELP
says "Deprecated: use NEW".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from shared.telemetry.histogram import Histogram

LabelValues = TypeVar("LabelValues", bound=tuple[str, ...])
_PREFIX: Final = "dalsegno_"


@dataclass(frozen=True, slots=True)
class _OldName:
    """The former name of a metric, and the former values of its labels."""

    name: str
    label_values: Mapping[str, str]


DEPRECATED: Final[Mapping[str, _OldName]] = {
    "worker_batch_sequences": _OldName("worker_batch_rows", {}),
    "worker_edge_events": _OldName("worker_edges", {"sent": "told", "received": "heard"}),
    "worker_out_of_order_edges": _OldName("worker_early_edges", {}),
    "worker_out_of_order_edge_bytes": _OldName("worker_early_edge_bytes", {}),
    "worker_prefix_cache_tokens": _OldName("worker_prefix_tokens", {"queries": "asked", "hits": "hit"}),
    "worker_speculative_tokens": _OldName("worker_guesses", {"drafted": "guessed", "accepted": "stood"}),
}
"""The renamed metrics, by their new name without prefix."""


def with_deprecated(families: Iterable[Metric]) -> Iterator[Metric]:
    """The families, each followed by the one with its deprecated name, if it has one."""
    for family in families:
        yield family
        old = DEPRECATED.get(family.name.removeprefix(_PREFIX))
        if old is not None:
            yield _renamed(family, old)


def _renamed(family: Metric, old: _OldName) -> Metric:
    name = f"{_PREFIX}{old.name}"
    suffix = "_total" if family.type == "counter" else ""
    renamed = Metric(name, f"Deprecated: use {family.name}{suffix}.", family.type)
    for sample in family.samples:
        labels = {label: old.label_values.get(value, value) for label, value in sample.labels.items()}
        renamed.add_sample(sample.name.replace(family.name, name, 1), labels, sample.value)
    return renamed


def gauge(name: str, help_: str, labels: Sequence[str], values: Mapping[LabelValues, float]) -> Metric:
    """A gauge family; `values` maps the values of `labels` to numbers."""
    return _filled(GaugeMetricFamily(f"{_PREFIX}{name}", help_, labels=labels), values)


def counter(name: str, help_: str, labels: Sequence[str], values: Mapping[LabelValues, float]) -> Metric:
    """A counter family; Prometheus adds `_total` to its name."""
    return _filled(CounterMetricFamily(f"{_PREFIX}{name}", help_, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[LabelValues, float]) -> Metric:
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def histogram(
    name: str,
    help_: str,
    labels: Sequence[str],
    values: Mapping[LabelValues, Histogram],
    *,
    prefix: str = _PREFIX,
) -> Metric:
    """A histogram family. Another `prefix` is that of a convention's name."""
    family = HistogramMetricFamily(f"{prefix}{name}", help_, labels=labels)
    for label_values, one in values.items():
        bounds = [*(f"{bound:.12g}" for bound in one.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(one.counts)), strict=True))
        family.add_metric(label_values, buckets, one.sum)
    return family
