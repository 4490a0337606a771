"""The formats of strings, each as a pattern (Rust's `regex`) of texts that every validator accepts.

They are stricter than the definitions where validators differ: no leap seconds, `T` and `Z` as capitals, no
year 0, a 29th of February only in leap years, host names of at most 253 characters without punycode.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Format:
    """The texts of a format: those that match all patterns and are no longer than `max_length`."""

    patterns: tuple[str, ...]
    max_length: int | None = None


_YEAR: Final = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_MINUTE})"

_DAYS: Final = "[0-9]{1,9}D"
_MONTHS: Final = f"[0-9]{{1,9}}M(?:{_DAYS})?"
_YEARS: Final = f"[0-9]{{1,9}}Y(?:{_MONTHS})?"
_SECONDS: Final = "[0-9]{1,9}S"
_MINUTES: Final = f"[0-9]{{1,9}}M(?:{_SECONDS})?"
_HOURS: Final = f"[0-9]{{1,9}}H(?:{_MINUTES})?"
_CLOCK: Final = f"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"
_DURATION: Final = f"P(?:(?:{_YEARS}|{_MONTHS}|{_DAYS})(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,9}}W)"

_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL})*"
_ALPHABETIC_END: Final = r"(?:[^.]*\.)*[^.]*[a-zA-Z][^.]*"
"""The last label has a letter; four numbers would be an address."""
_ONE_HYPHEN: Final = "(?:[^-]|-[^-])*"
"""No two hyphens in a row: `xn--` begins punycode, which has rules of its own."""
_ATOM: Final = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX: Final = "[0-9a-fA-F]"
_GROUP: Final = f"{_HEX}{{1,4}}"
_IPV6: Final = "(?:{})".format(
    "|".join(
        [
            f"(?:{_GROUP}:){{7}}{_GROUP}",
            f"::(?:{_GROUP}(?::{_GROUP}){{0,6}})?",
            *(
                f"(?:{_GROUP}:){{{before}}}:(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?"
                for before in range(1, 7)
            ),
            f"(?:{_GROUP}:){{7}}:",
        ]
    )
)
_PERCENT: Final = f"%{_HEX}{{2}}"
_SEGMENT_CHARACTER: Final = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|{_PERCENT})"
_QUERY: Final = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?-]|{_PERCENT})*"
_USER: Final = rf"(?:(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|{_PERCENT})*@)?"
_REGISTERED_NAME: Final = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=-]|{_PERCENT})*"
_AUTHORITY: Final = rf"{_USER}(?:\[{_IPV6}\]|{_REGISTERED_NAME})(?::[0-9]{{0,5}})?"
_PATH: Final = (
    f"(?://{_AUTHORITY}(?:/{_SEGMENT_CHARACTER}*)*|/?{_SEGMENT_CHARACTER}+(?:/{_SEGMENT_CHARACTER}*)*|/)?"
)

FORMATS: Final[dict[str, Format]] = {
    "date-time": Format((f"{_DATE}T{_TIME}",)),
    "time": Format((_TIME,)),
    "date": Format((_DATE,)),
    "duration": Format((_DURATION,)),
    "email": Format((rf"{_ATOM}+(?:\.{_ATOM}+)*@{_HOST}", f"[^@]{{1,64}}@{_ONE_HYPHEN}"), max_length=254),
    "hostname": Format((_HOST, _ALPHABETIC_END, _ONE_HYPHEN), max_length=253),
    "ipv4": Format((_IPV4,)),
    "ipv6": Format((_IPV6,)),
    "uuid": Format((f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",)),
    "uri": Format((rf"[a-zA-Z][a-zA-Z0-9+.-]*:{_PATH}(?:\?{_QUERY})?(?:\#{_QUERY})?",)),
}
"""By name."""
