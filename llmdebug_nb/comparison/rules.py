"""The rules that decide a row of a comparison: the last one that changed its verdict has a name."""

from __future__ import annotations

from enum import Enum


class Rule(Enum):
    """What decided a row. The values are what the user reads; "" if the figures say it all."""

    # it can't be measured
    ALONE = "only one run has it"
    UNMEASURED = "its values could not be measured"
    UNINITIALISED = "memory that was not written to yet, or not wholly: what it holds is chance"
    OTHER_MASK = "one marks tokens, the other is a mask of scores: what they do is compared"
    OTHER_BATCH = "not comparable: it is made of all of a batch, and the runs have other batches"
    MASK_ALONE = (
        "not comparable: most of its values are masked, so its statistics only describe the mask"
    )
    OTHER_SHAPE = "another shape"

    # it is measured, and a limit decides
    USER_LIMIT = "the user's limit"
    NOISE = ""
    CHANNEL_OFF = "a channel is further off than the steps of its quantisation"
    PRODUCT_OFF = "it is not the product of mine's own input and weight, as golden's is of golden's"
    CLIPPED = "integers are clipped where golden's are not"
    NEAR_TIE = "the two programs chose differently between nearly equal scores"
    TOO_EVEN = "all elements are off by one factor, which rounding does not cause"
    COARSER = "mine has a coarser dtype here than in the other calls of this kind"
    PASSED_ON = "within its limit only because earlier tensors differ"
    FACTOR_ROUNDED = "what its call multiplies with a quantised weight, it rounds to 8 bits first"
    CLOSE = "close to a tensor of the other run, but by more than noise"

    # it agrees where it is read otherwise
    NO_TOKEN = "differs only where the batch has no token (padding)"
    SORTED = "its rows are tokens in another order, as sorted by their experts"
    SAME_PLACES = "compared for the tokens of which both choose the same places, in one order"
    UNTOUCHED = "compared at the tokens that another choice at a near tie has not touched"
    MIXED = "not comparable: it is made of all places of a batch, also of those without a token"
    AFTER_TIE = "not comparable: it follows a choice that was made differently at a near tie"

    # what the user marked, and what the search proved
    EXPECTED = "marked as expected"
    FOLLOWS = "explained by what is expected"
    REJOINED = "written otherwise in the other run, equal in effect"
    REPLAYED = "a replay shows that it follows from what is expected"
    MAGNIFIED = "a replay shows that it is rounding, its own or that of its inputs"

    @property
    def text(self) -> str:
        return self.value
