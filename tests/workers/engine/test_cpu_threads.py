import pytest

from workers.engine.cpu_threads import threads_for


@pytest.mark.parametrize(
    ("parameters", "cores", "threads"),
    [(600_000, 64, 1), (600_000, 1, 1), (600_000_000, 1, 1), (600_000_000, 2, 1), (8_000_000_000, 16, 15)],
)
def test_one_core_is_left_and_small_models_are_not_shared_out(
    parameters: int, cores: int, threads: int
) -> None:
    assert threads_for(parameters, cores) == threads
