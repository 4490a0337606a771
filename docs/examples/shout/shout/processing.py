"""The CPU nodes. A worker loads this module once and calls `run` from threads."""

from models.base import CpuResult
from shared.tensors import Handle


def load(checkpoint, *, max_seq_len):
    """Load what the nodes need from the checkpoint folder: here, nothing."""
    return Shouting()


class Shouting:
    """Three nodes without state."""

    eos_ids = ()
    tool_calls = ""

    def run(self, node, key, inputs, args):
        match node:
            case "listener":
                words = _text_of(args["inputs"]).split()
                return CpuResult(
                    facts={"count": len(words)}, outputs={"words": _text(f"{key}/words", " ".join(words))}
                )
            case "taker":
                word, _, rest = inputs["words"].data.decode().partition(" ")
                return CpuResult(
                    outputs={"word": _text(f"{key}/word", word), "words": _text(f"{key}/words", rest)}
                )
            case "shouter":
                return CpuResult(
                    outputs={"loud": _text(f"{key}/loud", f"{inputs['word'].data.decode().upper()}! ")}
                )

    def text_decoder(self):
        raise NotImplementedError("no node of this model generates tokens")


def _text_of(inputs):
    """The last message of a chat, or the text."""
    if inputs.get("messages"):
        return inputs["messages"][-1]["content"]
    return inputs.get("text") or ""


def _text(key, text):
    data = text.encode()
    return Handle(key=key, dtype="uint8", shape=(len(data),), data=data)
