# SPDX-License-Identifier: Apache-2.0
"""What a transfer must move, counted token by token from the models' public descriptions.

Nothing here comes from the program: a group is (name, layers, window, bytes of one token in one layer), and which
blocks travel follows from asking of each position whether the next query sees it.
"""

import math

BF16 = 2
PIECE = 512  # prompt tokens that one hash id stands for
REFERENCE_TOKENS = 8192  # of the prompt whose needs decide how a node cuts its pool

# name -> [(group, layers, window or None, bytes per token and layer)]
PRESETS = {
    # 18 layers, every sixth one full, window 512; one KV head of 256.
    "gemma-3-270m": [("full", [5, 11, 17], None, 2 * 1 * 256 * BF16),
                     ("swa", [i for i in range(18) if i not in (5, 11, 17)], 512, 2 * 1 * 256 * BF16)],
    # 24 layers, sliding and full in turn, window 128; 8 KV heads of 64.
    "gpt-oss-20b": [("full", list(range(1, 24, 2)), None, 2 * 8 * 64 * BF16),
                    ("swa", list(range(0, 24, 2)), 128, 2 * 8 * 64 * BF16)],
    # 32 full layers; 8 KV heads of 128.
    "llama-3.1-8b": [("full", list(range(32)), None, 2 * 8 * 128 * BF16)],
    # 61 layers of latent attention: 512 latent and 64 rotary elements a token, no separate values.
    "mla-deepseek-v3": [("full", list(range(61)), None, (512 + 64) * BF16)],
}


def live_blocks(prompt, block, window):
    """Ordinals that the query at position `prompt` can still see a part of; a last block counts in its full extent."""
    live = []
    for ordinal in range(-(-prompt // block)):
        positions = range(ordinal * block, (ordinal + 1) * block)
        # The query sees itself and the window - 1 positions before it.
        if window is None or any(prompt - position < window for position in positions):
            live.append(ordinal)
    return live


def moved(preset, block, prompt, cached=0, draft_layers=0):
    """(pages, bytes) that a request of so many prompt tokens moves when the receiver has the first `cached` of them.

    The layers of a draft model are shaped like the model's full ones.
    """
    pages = 0
    total = 0
    groups = PRESETS[preset]
    if draft_layers > 0:
        groups = groups + [("draft", range(draft_layers), None, groups[0][3])]
    for _, layers, window, token_bytes in groups:
        wanted = [ordinal for ordinal in live_blocks(prompt, block, window)
                  if cached < prompt and (ordinal + 1) * block > cached]
        pages += len(wanted)
        total += len(wanted) * block * len(layers) * token_bytes
    return pages, total


class Cache:
    """What a node with room for everything knows: a set of (group, all ids up to a block's last token, its extent)."""

    def __init__(self, preset, block, generation, chunks=False):
        self.preset = preset
        self.block = block
        self.generation = generation
        self.chunks = chunks
        self.known = set()

    def key(self, group, ids, prompt, ordinal):
        end = min((ordinal + 1) * self.block, prompt)
        return group, tuple(ids[:-(-end // PIECE)]), ordinal, end

    def holds(self, ids, prompt, tokens):
        """Whether the first `tokens` are there, in every group, and any page at all."""
        any_page = False
        for group, _, window, _ in PRESETS[self.preset]:
            # A receiver needs what the query behind the prompt sees; who computes on, what the next token sees.
            live = live_blocks(prompt if self.generation else tokens, self.block, window)
            needed = [ordinal for ordinal in live if ordinal * self.block < tokens]
            any_page = any_page or bool(needed)
            if any(self.key(group, ids, prompt, ordinal) not in self.known for ordinal in needed):
                return False
        return any_page

    def find(self, ids, prompt):
        """Tokens of a prompt that are there."""
        most = prompt if self.generation else prompt - 1
        if self.chunks:  # the first chunk begins at the edge of a block
            most = most // self.block * self.block
        lengths = [most] + list(range(self.block, most, self.block))[::-1]
        return next((n for n in lengths if self.holds(ids, prompt, n)), 0)

    def learn(self, ids, prompt, cached):
        """A prompt of which so many tokens were there has been computed, or has come."""
        for group, _, window, _ in PRESETS[self.preset]:
            blocks = set(live_blocks(prompt, self.block, window))
            if self.chunks:  # every block that is computed is there for a while
                blocks |= set(range(cached // self.block, -(-prompt // self.block)))
            self.known |= {self.key(group, ids, prompt, ordinal) for ordinal in blocks}


def room_for(preset, block, prompts):
    """pool.bytes with which a node has pages for all of these prompts at a time, and a block of scratch for each."""
    groups = [(window, block * len(layers) * token_bytes) for _, layers, window, token_bytes in PRESETS[preset]]
    need = [len(live_blocks(REFERENCE_TOKENS, block, window)) for window, _ in groups]
    times = max(sum(len(live_blocks(prompt, block, window)) + 1 for prompt in prompts) / n
                for n, (window, _) in zip(need, groups))
    return sum((math.ceil(times * n) + 1) * size for n, (_, size) in zip(need, groups))
