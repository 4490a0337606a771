"""Checks of the passes that drivers ask for. Imports no torch."""

from collections.abc import Mapping, Sequence
from typing import Final

from models.programs import Mask, Pass
from shared.errors import BugError, ClientError
from workers.kv_engine.node import FULL, KVNode, masks_of, vocab_size_of


class PassChecks:
    """Checks passes before anything is done for them.

    Args:
        nodes: the node, whose name is empty, and its towers by name.
        max_tokens: the most tokens of a pass.
    """

    def __init__(self, nodes: Mapping[str, KVNode], *, max_tokens: int) -> None:
        self._nodes: Final = nodes
        self._max_tokens = max_tokens

    def check_round(self, asked: Sequence[Pass]) -> None:
        """Check the passes of one round.

        Raises:
            BugError: the driver asks for what cannot be.
            ClientError: a pass is too long.
        """
        names = [one.context for one in asked]
        if len(set(names)) != len(names):
            raise BugError(f"a program asked for passes of {names}: expected different contexts")
        for one in asked:
            self._check(one)

    def _check(self, asked: Pass) -> None:
        node = self._nodes.get(asked.tower)
        if node is None:
            known = sorted(name for name in self._nodes if name)
            raise BugError(f"a pass names the tower {asked.tower!r}: expected one of {known}, or none")
        if (asked.ids is None) == (asked.embeds is None) or not asked.tokens:
            raise BugError("a pass needs ids or embeds, one of them, of at least one token")
        vocab_size = vocab_size_of(node)
        if asked.ids is not None and not 0 <= min(asked.ids) <= max(asked.ids) < vocab_size:
            raise BugError(
                f"a pass has token ids from {min(asked.ids)} to {max(asked.ids)}: expected them below "
                f"{vocab_size}"
            )
        if asked.embeds is not None and asked.embeds.dim() != 2:
            raise BugError(
                f"a pass has embeddings of shape {tuple(asked.embeds.shape)}: expected (tokens, hidden)"
            )
        routes = asked.routes
        if routes is not None and tuple(routes.shape) != (asked.tokens,):
            raise BugError(
                f"a pass of {asked.tokens} tokens has routes of shape {tuple(routes.shape)}: expected one "
                "for each token"
            )
        wanted = asked.logits
        if wanted is not None and not (wanted and 0 <= min(wanted) <= max(wanted) < asked.tokens):
            raise BugError(
                f"a pass of {asked.tokens} tokens asks for the logits of {list(wanted)[:8]}: expected "
                "indices of its tokens, at least one"
            )
        self._check_mask(asked, node)
        self.check_length(asked.tokens)

    def check_length(self, tokens: int) -> None:
        """Check the length of a pass.

        Raises:
            ClientError: it is too long.
        """
        if tokens > self._max_tokens:
            raise ClientError(
                f"the request needs a forward pass of {tokens} tokens, which is not split; the most is "
                f"{self._max_tokens} (model_kwargs.max_pass_tokens): ask for a smaller output, or raise "
                "it",
                code="pass_too_long",
            )

    @staticmethod
    def _check_mask(asked: Pass, node: KVNode) -> None:
        if asked.mask is Mask.FRAMES and (asked.frame_tokens < 1 or asked.tokens % asked.frame_tokens):
            raise BugError(
                f"a pass of {asked.tokens} tokens has frames of {asked.frame_tokens}: expected whole frames"
            )
        if asked.mask is not Mask.CAUSAL and FULL not in masks_of(node):
            raise BugError(
                f"a pass has the mask {asked.mask}, but node {node.name!r} declares only "
                f"{sorted(masks_of(node))}: expected {FULL!r} among its masks"
            )
