"""Every number that decides a judgement or bounds a search, with its derivation and unit.

Modules read them as `constants.NAME` when they run, so `benchmarks/constants.py` can change one in
a process and show what its half and its double do. The first part changes answers. The second part,
work limits, bounds time and memory: a larger limit costs more, and may find more. The third part is
what texts show.

Errors are relative L2, ||m - g|| / ||g||, unless a comment says otherwise; what is judged divides
each row by its size first (`comparison/rows.py`). An eps is the machine epsilon of a dtype: 0.008
in bfloat16, 0.001 in float16, 1e-7 in float32. Two independent random tensors of one scale have an
error of sqrt(2).

"Correct programs" are 18 ports and harmless changes of the benchmarks, in float32 and bfloat16:
13,600 tensors. Half of their errors are below 0.009 in bfloat16, 99 % below 0.031 and all below
0.14. In float32 all are below 1e-6.
"""

from __future__ import annotations

import math

# === judgement: numbers of a float ==============================================================

# The relative rounding of float32: its values carry 24 bits. Equal values count as this far apart,
# and one element proves no more than 24 bits, however exact a fit is.
FINEST = 2.0**-24
# Error of float32 values that one or two operators more have rounded: a limit is no lower.
EXACT = 2.0**-22
# A share of the largest number of a dtype. What is larger is infinite: a fill may have been added.
INFINITE_SHARE = 0.99
# A share of the lowest number of a dtype, or of a tensor with a fill. What is below is masked:
# scores may be added to a fill, and no activation is as large.
MASK_SHARE = 0.5
NO_ACTIVATION = -(2.0**27)  # a score of 4 or less that is added to it is lost in float32: a fill
# A number. A mask hides with -inf, a dtype's lowest number, -1e9 or -1e4 (the mildest fill in use),
# to which a score may be added. Scores and activations stay above: the largest known are thousands.
MASK_FILL = -9e3
# Sums of float32 squares are exact enough between these sizes; other tensors become float64.
LARGEST_SQUARED, SMALLEST_SQUARED = 1e15, 1e-15
# A share of the sum of absolute values: float64 sums of 10^6 terms in another order differ by at
# most 2**-53 for each addition, 1e-10 in all.
SAME_SUM = 1e-9
# A share of the sum of squares: float64 distances this close are one distance.
SAME_DISTANCE = 1e-12
# Relative: Python numbers this close are one constant that was computed in two ways (1 / sqrt(64),
# 64 ** -0.5). A float32 detour leaves 1e-7.
SAME_SCALAR = 1e-6

# In eps of the coarser side: the error of a token's logits that rounding explains. Llama in vLLM
# and llama.cpp is 10 eps from Transformers in float32, 2 in bfloat16. An epsilon of 1e-2 in a norm,
# a bug that changes no greedy token, moves float32 logits by more than 1e3.
LOGITS_EPSILONS = 16.0
# Importance ratios farther from 1 are clipped: epsilon of PPO (Schulman et al. 2017, section 6.1).
CLIP = 0.2

# === judgement: pairing by value and layout =====================================================

# Error of tensors that hold the same values in another layout, by another operator or program. 90 %
# of the tensors of correct programs in bfloat16 stay below, and all in float32. A layer's update
# moves a tensor by a tenth or more.
SAME_VALUES = 0.02
# In eps: tens of random roundings of 0.3 eps, amplified twice, add up to this. It counts where it
# is more than SAME_VALUES: 0.06 in bfloat16, above 99.9 % of the tensors of correct programs.
SAME_VALUES_EPSILONS = 8.0
# Error beyond which a layout is wrong. Bugs and 4-bit rounding stay below it in the right layout.
WRONG_LAYOUT = 0.25
# Error up to which one of several layouts is taken: bfloat16 rounding (0.003) through a hundred
# operators that do not amplify it. 99.9 % of the tensors of correct programs stay below.
UNCLEAR_LAYOUT = 0.05
# Error up to which a layout ends the search: no other layout is that near by chance.
CERTAIN_LAYOUT = 1e-3
# How many weights may be interleaved in one fused tensor: gate and up 2; query, key and value 3.
MOST_TURNS = 3
# A layout must be this many times nearer than a simpler one. Two samples of one error of
# LAYOUT_SAMPLE elements are within 10 %; where few elements carry it, within a factor of two.
LAYOUT_TIE = 2.0
# Probability that a layout fits by chance. Times LAYOUTS_TRIED it is still below 0.1 %.
# Two unrelated tensors of n elements and one size are within a share e of that size of each other
# with probability e^n, the volume of that ball. So 0.25 says nothing on 4 elements (0.4 %), and
# 0.05 is no chance on 8 (4e-11). Where few elements carry the norm, n is their number.
LAYOUT_CHANCE = 1e-6
# Elements by which a tensor or slice is known: 4 within 1e-3 are 28 nats, one slice of 10^6.
FEWEST_ELEMENTS = 4
# Partners whose errors are within this factor of the smallest are equal up to rounding. The order
# of the calls decides among them. Rounding of one value in two programs differs by less.
TIED_PARTNERS = 4.0
# Elements of a landmark: a window along the last axis, the largest element in the middle. No
# head has fewer channels. Unrelated windows of 8 elements are within a share e of each other with
# probability e^8, the volume of that ball: 2e-10 for 0.06.
LANDMARK = 8
# A share of the landmarks of a tensor that a larger tensor must have, if it holds the tensor.
# Rounding, and two largest elements that are about equal, lose a few.
LANDMARKS_FOUND = 0.75
# Relative gap of two norms that rounding does not make, in any dtype of 16 bits.
NORM_GAP = 0.01
# Share of the smaller side that must have a partner: of a run's tensors, a model's leaves, a row's
# tokens, the slices along an axis. Chance matches fewer; the border of a shift or a cut has no
# partner.
MATCHED_SHARE = 0.5
# A share: more of the module calls without a partner make a graph nameless, and fewer indices than
# this are named as the ones that differ.
MAJORITY = 0.5

# === judgement: sequences of calls ==============================================================

# Decimal digits. The statistics of unrelated tensors agree to so many in one pair of a hundred.
TELLING_DIGITS = 2.0
# The same for results of different operators, of which there are more pairs.
REPLACED_DIGITS = 3.0
# Decimal digits; closer agreement counts as this much. Float32 has seven.
MOST_DIGITS = 6.0
# Share of the decimal digits of the coarser run's dtype that makes a match certain. Rounding takes
# the others: 0.5 of 2.1 digits in bfloat16, an error of 0.03.
MANTISSA_SHARE = 0.75
# Scores. What two calls have in common (operator, shape, name, output, digits) counts 7 at most. A
# certain pair outweighs a thousand of such pairs, and an anchor a thousand certain pairs: between
# two anchors a sequence has fewer.
CERTAIN_SCORE, ANCHOR_SCORE = 10_000, 10_000_000

# === judgement: noise ===========================================================================

# Share of sqrt(length) eps that a sum of products of random signs loses: 0.2, less by blocked
# summation (Higham, Accuracy and Stability, 4.2).
SUM_SHARE = 0.125
# The same for a common factor of all elements: it is one over the root of a sum, and a root halves
# the error.
SCALE_SUM_SHARE = 0.0625
# Share of an eps that the rounding of 16 elements or more, 0.2 eps each, adds to their common
# factor.
SCALE_SHARE = 0.05
# Share of an eps by which elements are off that two programs round each, by 0.2 eps.
BOTH_ROUND = 0.2 * math.sqrt(2)
# Floors of one operator: code between the modules runs several, each with a floor of its own.
GLUE_FLOORS = 2.0
# Times the error of the inputs: what a call without siblings in other layers may amplify. The calls
# of correct programs show 0.5 in the median and 1.27 at most. Two more draws of it are allowed.
AMPLIFICATION = 3.0
# Range of the amplification that siblings may show: what all calls of correct programs may have,
# and what their kind may explain. More is a bug in every layer.
LEAST_AMPLIFICATION, MOST_AMPLIFICATION = 1.75, 8.0
# A call may amplify this many times as much as the median of its siblings. 99 % of the calls of
# correct programs have 2.1 at most; the others are below LEAST_AMPLIFICATION.
SIBLING_SPREAD = 2.25
# Standard errors that the norm may be off which a few random elements carry: one in 10^4 is.
CARRIER_ERRORS = 4.0
# Carriers of a norm; so few may all be small by chance.
FEW_CARRIERS = 8
# Standard errors. A scale error this significant is a common factor: 9 rows show it by chance in
# one case of 10^4 (Student's t), 40 rows in one of 10^9. 99.9 % of the tensors of correct programs
# have 7.2 at most by elements, whose errors are not independent.
EVEN_ERRORS = 8.0
# So few rows don't tell whether all have a common factor.
FEW_ROWS = 8
# Share of the error. A smaller scale error is no common factor, however significant it is; half of
# the tensors of correct programs have 0.08.
EVEN_SHARE = 0.25
# Share of the noise of the inputs that may become even by chance: the mean of 25 random errors.
EVEN_BY_CHANCE = 0.2
# Draws of random signs that tell how far rounding may move a few elements. All of them lie below a
# quarter of a standard deviation in one case of 4e5. Of more elements, one draw tells.
DRAWS, FEW_ELEMENTS = 8, 64
# Elements of the widest vector register: 64 bytes in 512 bits. Others have a half, a quarter and
# so on, down to 2 of float64 in 128 bits.
MOST_LANES = 64
# The error of the worst row counts divided by this. In correct programs on random weights it is 3.5
# times the error of the whole at most; on trained ones 2.8 times in 99 %, 4.2 at most.
WORST_ROW = 4
# A limit over the difference of two recordings of golden: two draws of a noise differ by less.
CALIBRATED = 3.0
# Recordings of golden with another rounding, of which the one that moves a tensor most
# counts: two draws are within a factor of CALIBRATED of each other but in one case of 10^3.
PERTURBED_DRAWS = 2
# Steps on one side of zero of an 8-bit integer, by which the noise of quantisation is made.
BYTE_STEPS = 127.0
# Share of a tensor's choices (indices, tokens) that may be near ties. A wrong rule changes more.
NEAR_TIES = 0.25
# Share of an eps that rounding on one side adds to a common factor. Regular values may all be
# rounded one way.
CAST_SHARE = 0.2
# Share of the tensors that are coarser in mine. So many make the whole program coarser: in a mixed
# precision norms, softmax and sums stay in float32, while a bug is in one kind of call.
COARSER_SHARE = 0.25
# Grains of a quantised weight, the steps between its integers: root mean square of a channel's
# error. No element is rounded by more.
CHANNEL_GRAINS = 0.5
# Of the error that rounding a factor to 8 bits makes of a product: less is left if that is computed
# as the program does, but for a few elements in the middle of two steps, or beyond the last one. By
# other scales than the program's, about half of it is left.
EXACT_PRODUCT = 0.2
# Error from which on an expected difference explains nothing behind it: half of what zeros have.
# Gate and up swapped, another token's values or a wrong axis make 0.7 to 1.5.
PERTURBED = 0.5
# What Adam adds to a gradient's size before it divides by it: the default of torch.optim.Adam, and
# of its kin. Gradients below it move a weight less; weights of other programs have less noise then.
ADAM_EPSILON = 1e-8
# Of the expected one: so small is the smallest element of a gradient in one case of ten.
SMALLEST_BY_CHANCE = 0.1
# Error that a tensor of zeros has. Outputs that are no nearer to golden's say nothing about it.
UNRELATED = 1.0

# === judgement: blame ===========================================================================

# In eps: one operator's own error against float64. The operators of four correct models stay below
# 9, in any dtype.
OPERATOR_EPSILONS = 32.0
# The same for a few operators in a row, on tensors that agree within noise.
OPERATORS_EPSILONS = 64.0
# An operator of mine has a bug if its own error is this many times golden's.
OWN_ERROR_RATIO = 8.0
# One change of weights is another times a factor if this share of it at most is left. A rate of
# 1e-3 changes a float32 weight of size 1 by some 1e4 units of its rounding, one of 1e-5 by 100.
EVEN_SHARE_OF_CHANGE = 0.02
# A module passes an error on if its own share of it is below this.
PASSED_ON_SHARE = 0.5
# Error of tensors that do not hold the same values, in any dtype: 99.9 % of the tensors of correct
# programs are below half of it.
OTHER_VALUES = 0.1

# Elements of a tensor that is looked for among the elements of others: 8 of them are within 1e-4 of
# others by chance in one case of 1e-10, where a third of the range is filled.
FEWEST_FOUND = 8
# Of 1 / sqrt(n), the distance of the sorted elements of two tensors of one distribution.
SORTED_BY_CHANCE = 0.1

# === judgement: relation ========================================================================

# Nats of evidence that a relation needs. A comparison asks about at most 10^5 sites. With a chance
# of 1e-9 for each, one comparison in 10^4 tells a relation that is none.
CERTAIN_NATS = -math.log(1e-9)
# Median deviations. Elements beyond are clipped for the second count of evidence, in which outliers
# have no say. A normal distribution has 4 % of its elements there.
OUTLIER = 3.0
# Times the limit: the error of a sample or one slice. A slice of 8 normal elements stays below 2,
# and heavy tails (excess kurtosis 20) double that. All elements decide afterwards.
SAMPLE_SPREAD = 4.0
# Error of scales of slices that were estimated from golden's largest values. The estimate of a
# normal slice of 64 is 15 % off.
ESTIMATED_SCALES = 0.5
# The rows of a distribution sum to 1 this closely, in any dtype, dropout aside.
SUMS_TO_ONE = 0.1
# tanh is 1 in float64 from 19 on; a soft-cap's argument is looked for up to this.
SATURATED = 60.0
# One over the share of a tensor, its largest, off which a soft-cap is read: it bends these most.
SOFT_CAP_SHARE = 16

# Standard deviations by which a loss is a spike: of 10^9 losses around a normal median, one is so
# far above it, and no job has that many steps.
SPIKE = 6.0
# Losses before it that give the median, whose own error is then a ninth of their spread,
# 1.25 / sqrt(128).
SPIKE_WINDOW = 128
# Fewest of them to judge by: their spread is then known to a third, 1.17 / sqrt(16).
SPIKE_FEWEST = 16

# === work limits: layouts =======================================================================

# Layouts that are tried for a pair of tensors; each takes 50 to 100 microseconds.
LAYOUTS_TRIED = 400
# Layouts of one alignment that are tried before the next alignment has its turn.
LAYOUTS_IN_TURN = 32
# Elements on which a layout is tried. The error of an error is then 1 / sqrt(1024), 3 %.
LAYOUT_SAMPLE = 512
# Axes of a tensor whose permutations are tried: 120 of them. Tensors of models have no more axes
# that are longer than 1.
PERMUTED_AXES = 5
# Axes of which one tensor has a part only: of rows, and of features. One where an axis is split.
PARTIAL_AXES, PARTIAL_AXES_OF_SPLIT = 2, 1
# Equal blocks that are tried along an axis; heads and ranks are rarely more.
BLOCKS = 64
# Heads that a fused tensor is split into; the largest models have 128.
GROUPS = 512
# Slices along an axis that are looked for, and elements by which they are known.
SLICES = 64
# Elements of the larger tensor that are read along an axis: 32 MB of float64.
AXIS_ELEMENTS = 1 << 22
# Pairs of rows that are compared to find an order: below a second.
ROW_PAIRS = 1 << 26
# The element that each 4 bits of an integer hold, the lowest first, as AWQ packs: its `order_map`.
# J. Lin et al.: AWQ. 2023.
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
# Integers that 8 bits hold. A float32 that is a multiple of up to that is told from other numbers.
BYTE_INTEGERS = 256
# Times that factors of rows and columns are fitted in turn: each takes most of what the other left.
FACTOR_ROUNDS = 3

# === work limits: pairing =======================================================================

# Bytes of tensors that are kept because they are soon compared with others: a step of a model of a
# billion parameters, or a part of one that a larger one makes.
KEPT_BYTES = 1 << 27
# Candidates that are confirmed by their values. Unrelated tensors agree to TELLING_DIGITS in one
# pair of a hundred, so the right one is among the first.
CONFIRMED_CANDIDATES = 4
# Landmarks of a tensor that are looked up: a share of them has a standard error of 0.11 at most.
LANDMARKS_TRIED = 16
# Sides of a cell, in tolerances: a landmark and what is within the tolerance are in two cells.
LANDMARK_CELL = 2.0
# Alignments of one sequence, each without the pairs that were refused before.
ALIGNMENT_ROUNDS = 4
# Entries of a score table that is kept in memory as a whole: 8 MB.
SCORE_ENTRIES = 1 << 20
# Leaves of one model that are fused into one of the other: query, key, value and a bias.
FUSED_LEAVES = 4

# === work limits: blame =========================================================================

# Levels of objects in which a tensor is looked for: a cache holds layers, these lists of tensors.
STATE_DEPTH = 4

# Suspects that are replayed, and calls before a suspect that only magnifies.
SUSPECTS_REPLAYED, CALLS_BEFORE = 8, 24
# Operators of a region that are replayed. The error is made where the region begins: this is more
# than an attention with its projections, written operator by operator.
REGION_CALLS = 64
# Calls of a region that are tried with other tensors.
REGION_SUSPECTS = 12
# Lines of a region that are named: as many as one looks through.
REGION_LINES = 6
# Tensors around a value that are tried as its source. Each costs a read, and one more of them makes
# a chance hit likelier.
NEIGHBOURS = 24
# A call on other tensors may give this many times the elements that were recorded.
REPLAY_GROWTH = 64
# Elements of a tensor that may be a shape or pads: two for each axis, and no model has 32 axes.
SHAPE_ELEMENTS = 64
# Products of queries and keys that are computed at once: in float64 they take 128 MiB.
REPLAY_ROWS = 2**24
# Seconds of one replay in a process of its own: the largest matrix product of a layer takes one
# second on one core. Seconds that it waits for the next one: a user reads that long.
REPLAY_SECONDS, REPLAY_IDLE = 60, 120
# Replays of a comparison that may end their process. Each start takes the time of importing torch.
REPLAY_CRASHES = 3
# Seconds that the process has to end by itself, once nothing can be asked any more.
REPLAY_END = 1
# Containers in one another: an argument of attention nests two, and Python parses 100 at least.
ARGUMENT_DEPTH = 16
# Nodes of a traced module that are looked at.
TRACED_NODES = 400

# === work limits: relation ======================================================================

# Elements that are read at once: they stay in the processor's cache.
CHUNK = 1 << 18
# Rows of a tensor whose sizes are kept without its values, 8 bytes each. Caches of keys and values,
# which have a row for each head and token, make recordings of operators 15 to 20 % slower with
# 4,096 (benchmarks/capture.py, M), and no slower with these.
MOST_ROWS = 1 << 10
# Indices of an axis of rows that are told apart, 4 bytes each: all tokens of a prompt of this
# length. 10,000 pairs of such take 160 MB.
TOLD_ROWS = 1 << 12
# Elements. Two tensors of this size are compared in 0.1 s, and as many again of others with them.
RELATED_ELEMENTS = 1 << 22
# Elements of a tensor that is read from disk: 0.1 s.
READ_ELEMENTS = 1 << 26
# Elements of a sample. Its error is within 1 / sqrt(2 * 2048) = 1.6 % of the whole tensor's for
# light tails.
RELATION_SAMPLE = 2048
# Elements of a sample of slices: with an axis of 4096 that is 64 of each slice, the most it takes.
SLICED_SAMPLE, MOST_PER_SLICE = 1 << 18, 64
# An axis whose slices are ordered. No vocabulary is larger; sorting so many keys takes 20 ms.
LONGEST_AXIS = 1 << 18
# Golden's slices that each slice of mine is measured against, and elements of these measurements
# together: 20 ms.
NEAREST_SLICES, MEASURED_ELEMENTS = 64, 1 << 22
# Slices that are matched first. If half of all have a partner, then FIRST_MATCHED of these have one
# too, but for a chance of 1e-5.
FIRST_SLICES, FIRST_MATCHED = 64, 16
# Whole numbers that a factor, or one over it, is told as: sizes of axes, to the width of a model.
LARGEST_FACTOR = 4096
# Elements of masks that are looked at, in whole matrices: 50 ms.
MASK_ELEMENTS = 1 << 21
# Bisections that find a soft-cap: double precision from any start.
BISECTIONS = 60

# === work limits: reading ========================================================================

# Rows of an index that one query reads: they take a second, of the minute after which an index
# counts as damaged, and 60 MB beside the records that are made of them.
ROWS_AT_ONCE = 50_000

# === work limits: measuring =====================================================================

# Bytes of tensors that are measured as one task, in a thread or on another machine. A core measures
# 100 MB/s, so a task takes 0.3 s or the time of its largest pair: long against the 10 ms that
# handing it over takes, and short enough that an interrupt or a worker that dies costs little.
BATCH_BYTES = 1 << 25
# Pairs of one task, however small they are: a core measures more than that in a second.
BATCH_JOBS = 500
# Bytes of a pair below which threads gain nothing: Python's own work, which one thread does at a
# time, is 0.6 ms of each pair, and the kernels take as long for 16,000 float32 elements on a side.
SMALL_BYTES = 1 << 17
# Bytes of a pair from which on no two pairs are measured at once in this process: measuring holds
# both tensors and up to three times their size in float64 for a layout.
ALONE_BYTES = 1 << 30

# Bytes read at once of a file of values: opening it takes as long, 20 us. Of so many files: 1 MB.
READ_AHEAD, FILES_AHEAD = 1 << 16, 16

# === work limits: cluster =======================================================================

# Seconds until a scheduler answers and has a worker: a queue of jobs hands out a node in minutes,
# and nobody waits for that in a cell; a process that starts takes 10 s on a busy machine.
CLUSTER_CONNECT = 30.0
# Seconds that a task may take beside its reading, and bytes that a worker reads and measures a
# second where it is slowest: a disk on the network that many read at once. A task of BATCH_BYTES
# takes 0.3 s on an idle core; a worker that imports torch first takes 10 s more.
CLUSTER_PATIENCE, SLOWEST_READING = 60.0, 1e6
# Workers that fail at a task before it is done in the process that asks: one may have bad memory or
# a full disk, two have not.
CLUSTER_TRIES = 2

# === what is recorded ===========================================================================

# Dimensions of a recorded tensor. PyTorch has no limit and NumPy's is 64; pages show each of them.
MOST_DIMENSIONS = 1000

# Lines of a function that are kept. Of 6,752 forwards in Transformers 5 the longest has 369, and
# the longest function that calls one, `generate`, 436.
FUNCTION_LINES = 600
# Bytes of all functions of a recording: a model of Transformers and the code around it have 40 kB,
# so this is enough for a hundred.
FUNCTIONS_BYTES = 4 << 20

# === what texts show ============================================================================

# Indices and runs of indices that a message lists.
INDICES_SHOWN = 8
# Channels, weights and reasons that a message names.
NAMES_SHOWN = 3
# A figure that is larger is written with a power of ten: nobody reads more groups of digits.
COUNTED_OUT = 1e12
# Differing scalars that a message names.
SCALARS_SHOWN = 4
# Characters of an argument; the recorder cuts its text there, so a longer one is not known whole.
ARGUMENT_CHARACTERS = 200
# Characters of a line of text in a script: with its quotes and indent it fits a page of 100.
SCRIPT_CHARACTERS = 80
# Lines of a module that are listed side by side.
LINES_SHOWN = 200
# Likeness of two lines of code that answer to each other, from 0 to 1, by difflib. Between two
# lines that are known to, those of ports have 0.4 to 0.9, and unrelated ones 0.2 to 0.4.
SIMILAR_LINES = 0.4
# Pairs of lines whose likeness is computed between two that are known: 40 beside 40, 0.1 s.
LINES_COMPARED = 1600
# Seconds until work shows its progress. Within 1 s a user's thought is unbroken (Nielsen, Usability
# Engineering, 1993, chapter 5), and half of that is for imports and drawing; shorter work needs
# no word.
PROGRESS_AFTER = 0.4
# Records of golden from which its first step is compared before all others, to say something early:
# a record takes some 0.3 ms, so that the answer to all of them would take 3 s, after which people
# lose their train of thought.
FIRST_STEP_FROM = 10_000
# Seconds between two drawings of a bar: a clock that ticks every second must not skip one.
PROGRESS_EVERY = 0.5
# Relative rounding of a value of a GGUF file beside its quantisation: its scale is rounded to
# float16 (half a unit: 2**-11), and it may come from a file in float16 (as much again).
GGUF_SCALE_ROUNDING = 2.0**-10
# Steps beyond its half step by which a value may be clipped. Q4_0 and Q5_0 have a level less above
# than below: 1/2. The search for scales of K quants lets the ends go: up to 5.3 with ggml 0.13 on
# normal values and on heavy tails (Student's t with 2 degrees, outliers 50 times as large).
GGUF_CLIPPED_STEPS = 8.0
# Share of the elements of a tensor, quantised with an importance matrix, that may lie further than
# one step from the original: 3e-5 at most with ggml 0.13. A wrong tensor has 0.3 and more.
GGUF_WEIGHTED_SHARE = 1e-3
# Rows of a weight that are matched with those of another to find their order: 8,192 squared
# distances of 64 elements take 0.5 s and 256 MiB.
ROWS_MATCHED = 8192
# Of the values that a comparison in lockstep holds, the share (one of so many parts) that each of
# the two programs may be ahead of what was taken from it: with both ahead, three quarters are left
# for values that wait for a partner or are asked for again.
LOCKSTEP_AHEAD = 8
# Factor by which an error must exceed the largest one that was judged to be noise, before all that
# ran in lockstep so far is judged again: from one float32 unit to an error of 1 these are 24 times.
LOCKSTEP_GROWTH = 2.0
