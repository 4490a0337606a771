"""The choice of a variant for a processor, and the errors of a compilation."""

from pathlib import Path

import pytest

from workers.cpu_kernels import compilation
from workers.cpu_kernels.compilation import VARIANTS, BuildError

AVX2 = "fma avx2 bmi2 f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
ZEN5 = f"{AVX512} avx512_vnni avx512_bf16"


@pytest.mark.parametrize(
    ("has", "names"),
    [
        (f"{ZEN5} avx_vnni amx_tile amx_bf16 amx_int8", [variant.name for variant in VARIANTS]),
        (f"{ZEN5} amx_tile amx_bf16", ["avx512_bf16", "avx512_vnni", "avx512", "plain"]),
        (f"{AVX512} avx512_vnni", ["avx512_vnni", "avx512", "plain"]),
        (AVX512, ["avx512", "plain"]),
        (f"{AVX2} avx_vnni", ["avx_vnni", "plain"]),
        (AVX2, ["plain"]),
    ],
)
def test_a_processor_gets_what_it_can_run_the_best_first(has: str, names: list[str]) -> None:
    assert [one.name for one in compilation.variants_for(frozenset(has.split()))] == names


def test_an_old_processor_gets_none() -> None:
    assert compilation.variants_for(frozenset({"sse4_2"})) == []


@pytest.mark.processes
def test_a_compiler_that_refuses_is_told_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    with pytest.raises(BuildError, match="ended with status 3: no such option"):
        compilation.build(VARIANTS[0], tmp_path / "built")

    assert list((tmp_path / "built").iterdir()) == []


@pytest.mark.processes
def test_clang_is_not_told_of_warnings_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Clang rejects unknown warning options, even with `-Wno-`, unless that is allowed."""
    compiler = tmp_path / "clang++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-Wno-unknown-warning-option*) ;; *-Wno-maybe-uninitialized*-Werror*|'
        "*-Werror*-Wno-maybe-uninitialized*) echo 'unknown warning option' >&2; exit 1 ;; esac\n"
        'for made; do :; done; echo compiled > "$made"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    assert compilation.build(VARIANTS[0], tmp_path / "built").read_text() == "compiled\n"


def test_libraries_of_other_sources_are_cleared_away(tmp_path: Path) -> None:
    ours = tmp_path / compilation.file_name(VARIANTS[0])
    for path in (ours, tmp_path / "kernels-amx-000000000000.so", tmp_path / "README"):
        path.touch()

    compilation.clean(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {ours.name, "README"}
