"""The programs of BAGEL's language model: the flow from noise to the latents of an image.

    flow     all three branches of guidance on one node: one run, whose output is the latents
    branch   one of them, in a loop over three nodes: its output is the velocity of this step

A branch without weight in a step has no pass. Branches with the same prompt are one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from models.bagel.branches import Branch, FlowNode, prompt_round
from models.bagel.drawing import CHECKPOINT_STEPS, ROOM, FlowRequest
from models.bagel.guidance import Step, first_latents, guided, moved, progress_of, steps_of
from models.bagel.previews import is_shown, previews_of
from models.bagel.spans import BRANCHES, CFG_IMG, CFG_TEXT, MAIN, Place, contexts_of
from models.programs import Driver, Going, Pass, Turn


def branches_of(contexts: Mapping[str, tuple[Place, ...]], steps: Sequence[Step]) -> dict[str, str]:
    """The branch that computes each branch with a weight in a step: the first one with equal contexts."""
    wanted = list(dict.fromkeys(name for step in steps for name in step.branches))
    return {name: next(one for one in wanted if contexts[one] == contexts[name]) for name in wanted}


class Flow:
    """A run of the program `flow` (`models.programs.Driver`).

    Inputs: `token_ids` of the whole prompt, the thought included, and `embeds`, the rows of all its images.
    Output: `latents`, (n, channels) float32.

    Attributes:
        counts: `forwards`, the passes of its steps so far.
    """

    def __init__(
        self, node: FlowNode, inputs: Mapping[str, torch.Tensor], request: FlowRequest, seed: int
    ) -> None:
        ids: list[int] = inputs["token_ids"].tolist()
        contexts = contexts_of(request.spans_of(len(ids)))
        self._node = node
        self._request = request
        self._steps = steps_of(request.flow)
        self._computed_by = branches_of(contexts, self._steps)
        main = Branch(MAIN, contexts[MAIN], ids, inputs["embeds"])
        self._branches = {MAIN: main} | {
            name: Branch(name, contexts[name], ids, inputs["embeds"], main)
            for name in self._computed_by.values()
            if name != MAIN
        }
        self._latents = first_latents(request, node.latent_channels, seed).to(node.device)
        self._number = 0
        self._asked: list[str] = []
        self.counts: Final = {"forwards": 0}

    @property
    def max_contexts(self) -> int:
        """One for each branch."""
        return len(self._branches)

    @property
    def max_tokens(self) -> int:
        """The tokens of all branches, with a step in each."""
        own = (one.cells - one.shared for one in self._branches.values())
        return sum(own) + len(self._branches) * (self._request.tokens + 2)

    @property
    def longest_pass(self) -> int:
        """A step of one branch, or a part of a prompt."""
        return max(self._request.tokens + 2, *(one.longest for one in self._branches.values()))

    def passes(self) -> Sequence[Pass]:
        """The next passes over prompts, then those of a step."""
        self._asked = []
        if found := prompt_round(list(self._branches.values())):
            return found
        step = self._steps[self._number]
        self._asked = list(dict.fromkeys(self._computed_by[name] for name in step.branches))
        embeds = self._node.latent_embeds(self._latents, step.time, self._request.grid)
        return [self._branches[name].step_pass(embeds) for name in self._asked]

    def resume(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with the latents of a checkpoint; the prompts are computed again.

        Raises:
            ValueError: the state is of another flow.
        """
        latents, number = state["latents"], int(state["step"])
        if latents.shape != self._latents.shape or not 0 < number < len(self._steps):
            raise ValueError(
                f"a checkpoint of latents {tuple(latents.shape)} after step {number}: expected latents "
                f"{tuple(self._latents.shape)} after one of the {len(self._steps)} steps but the last"
            )
        self._latents, self._number = latents.to(self._node.device), number

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | Going | None:
        """Take one step of the flow; the last one gives the latents."""
        if not self._asked:
            return None
        self.counts["forwards"] += len(hidden)
        found = dict(zip(self._asked, map(self._node.velocity, hidden), strict=True))
        step = self._steps[self._number]
        text = found[self._computed_by[CFG_TEXT]] if step.by_text else None
        images = found[self._computed_by[CFG_IMG]] if step.by_images else None
        velocity = guided(self._request.flow, found[MAIN], text, images)
        before, self._latents = self._latents, moved(self._latents, velocity, step)
        self._number += 1
        if self._number == len(self._steps):
            return {"latents": self._latents}
        previews = {}
        if is_shown(self._number, len(self._steps), self._request.flow.partial_images):
            previews = previews_of(self._node.colors, before, velocity, step.time, self._request.grid)
        return self._going(previews)

    def _going(self, previews: Mapping[str, torch.Tensor]) -> Going:
        """The progress after a step, and every fifth time a checkpoint."""
        state: dict[str, torch.Tensor] = {}
        if self._number % CHECKPOINT_STEPS == 0:
            state = {"latents": self._latents, "step": torch.tensor([self._number])}
        progress = progress_of(self._number, len(self._steps))
        return Going(progress=progress, previews=previews, state=state)


class BranchFlow:
    """A run of the program `branch`: one branch of a flow, over all calls of its node in the loop.

    Inputs: those of `Flow`, and in each call `latents`, (n, channels), or none for the noise of the seed, and
    `time_index`, the number of the step. Outputs: the branch's velocity, (n, channels) float32; (0,) in a
    step in which it has no weight, or if it has the same prompt as the main one; and `room`, (0,).

    Its first call computes nothing: once it returns, the run has its room in the KV cache.
    """

    def __init__(
        self,
        node: FlowNode,
        inputs: Mapping[str, torch.Tensor],
        request: FlowRequest,
        name: str,
        output: str,
        seed: int,
    ) -> None:
        ids: list[int] = inputs["token_ids"].tolist()
        contexts = contexts_of(request.spans_of(len(ids)))
        self._node = node
        self._request = request
        self._steps = steps_of(request.flow)
        self._output = output
        is_same = name != MAIN and contexts[name] == contexts[MAIN]
        self._is_wanted = name in branches_of(contexts, self._steps) and not is_same
        self._branch = Branch(name, contexts[name], ids, inputs["embeds"])
        self._noise = first_latents(request, node.latent_channels, seed)
        self._is_begun = False
        self._is_step = False
        self.counts: Final = {"forwards": 0}
        self.more(inputs)

    @property
    def max_contexts(self) -> int:
        """Its own."""
        return 1

    @property
    def max_tokens(self) -> int:
        """Its prompt and a step; nothing for a branch that is never asked."""
        return self._branch.cells + self._request.tokens + 2 if self._is_wanted else 1

    @property
    def longest_pass(self) -> int:
        """A step of the branch, or a part of its prompt."""
        return max(self._request.tokens + 2, self._branch.longest) if self._is_wanted else 0

    def more(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Take the latents of the next step."""
        latents = inputs["latents"] if inputs["latents"].numel() else self._noise
        self._latents = latents.to(self._node.device)
        self._step = self._steps[int(inputs["time_index"])]

    def passes(self) -> Sequence[Pass]:
        """The next pass over the prompt, or that of the step; none in a step without weight, or at first."""
        self._is_step = False
        if not self._is_begun or not self._has_weight:
            return []
        if found := prompt_round([self._branch]):
            return found
        self._is_step = True
        embeds = self._node.latent_embeds(self._latents, self._step.time, self._request.grid)
        return [self._branch.step_pass(embeds)]

    def take(self, hidden: Sequence[torch.Tensor]) -> Turn | None:
        """Give the velocity of the step."""
        if self._is_begun and self._has_weight and not self._is_step:
            return None
        self._is_begun = True
        self.counts["forwards"] += len(hidden)
        nothing = torch.zeros(0, device=self._node.device)
        found = self._node.velocity(hidden[0]) if hidden else nothing
        return Turn(outputs={self._output: found, ROOM: nothing})

    @property
    def _has_weight(self) -> bool:
        """True if the velocity has a weight in this step."""
        return self._is_wanted and self._branch.name in self._step.branches


def start_flow(
    node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
) -> Driver:
    """The program `flow` (`models.programs.Program`)."""
    return Flow(node, inputs, msgspec.convert(args, FlowRequest), seed)


def start_branch(
    node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
) -> Driver:
    """The program `branch` (`models.programs.Program`); the node's name says which one it computes."""
    branch, output = BRANCHES[node.name]
    return BranchFlow(node, inputs, msgspec.convert(args, FlowRequest), branch, output, seed)
