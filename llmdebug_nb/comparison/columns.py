"""The names of metrics in upstream's tables. A note says where the meaning differs from ours.

msit: the columns of ``msit llm compare``; msprobe: those of ``msprobe compare``.
"""

from __future__ import annotations

HIDES = (
    "msit gives 0 where |golden| <= 2**-23, which hides a golden 0 against a 5; "
    "here every absolute error counts"
)
FLOAT32 = "msit computes in float32; here sums are in float64"
WHOLE = "over the whole flattened tensor, as msit does; kl_row_mean and kl_row_max go row by row"
SIGNED = "msprobe writes a percentage of signed differences; here the size"

CUTS = ("layer", "module", "api", "logits")  # the levels of msit's rows, and all of them:
LIST_ALL = "all"

# upstream's name -> ours, and the note
UPSTREAM: dict[str, tuple[str, str]] = {
    # msit
    "cosine_similarity": ("cosine_similarity", ""),
    "max_relative_error": ("max_relative_error", FLOAT32),
    "mean_relative_error": ("mean_relative_error", FLOAT32),
    "max_absolute_error": ("max_absolute_error", HIDES),
    "mean_absolute_error": ("mean_absolute_error", HIDES),
    "kl_divergence": ("kl_divergence", WHOLE),
    "relative_euclidean_distance": (
        "relative_euclidean_distance",
        "msit gives 0 where |golden| <= 2**-23, here inf unless mine is 0 too",
    ),
    "l1_norm": ("l1_norm", FLOAT32),
    "ulp_max_diff": (
        "max_gap_ulp",
        "msit writes |max m - max g| and the ulp in two columns; here one over the other",
    ),
    # msprobe
    "Cosine": ("cosine_similarity", ""),
    "EucDist": ("euclidean_distance", ""),
    "MaxAbsErr": ("max_absolute_error", ""),
    "MaxRelativeErr": (
        "max_relative_error",
        "of statistics alone msprobe writes that of the maximum: max_stat_relative_error",
    ),
    "One Thousandth Err Ratio": ("one_thousandth_err_ratio", ""),
    "Five Thousandths Err Ratio": ("five_thousandths_err_ratio", ""),
    "Max diff": ("max_stat_absolute_error", SIGNED),
    "Min diff": ("min_stat_absolute_error", SIGNED),
    "Mean diff": ("mean_stat_absolute_error", SIGNED),
    "L2norm diff": ("l2norm_stat_absolute_error", SIGNED),
    "MinRelativeErr": ("min_stat_relative_error", SIGNED),
    "MeanRelativeErr": ("mean_stat_relative_error", SIGNED),
    "NormRelativeErr": ("l2norm_stat_relative_error", SIGNED),
}
# short names for limits
SHORT = {
    "cosine": "cosine_similarity",
    "max_abs": "max_absolute_error",
    "mean_abs": "mean_absolute_error",
    "max_rel": "max_relative_error",
    "relative_l2": "relative_euclidean_distance",
    "kl": "kl_row_max",
}
ALIASES = {name: ours for name, (ours, _) in UPSTREAM.items()} | SHORT
