"""Reference values in float64 for losses, divergences and corrections, and the inputs that belong to them.

Two sequences of three tokens, the last token of the second one masked; here as the five loss tokens. Names
are those of the reference: L losses, K divergences, O off-policy corrections, N normalisation, T temperature.
"""

LOGPROBS = [-1.0, -0.5, -2.0, -0.2, -1.5]
OLD = [-1.2, -0.9, -1.6, -0.7, -1.0]
ROLLOUT = [-1.1, -1.4, -1.6, -0.7, -0.3]
REFERENCE = [-1.1, -0.4, -2.5, -0.3, -1.5]
ADVANTAGES = [1.0, 1.0, 1.0, -0.5, -0.5]
SEQUENCES = [0, 0, 0, 1, 1]
LENGTHS = [3, 3, 3, 2, 2]

L1_TOKENS = [-1.22140275816, -1.28, -0.670320046036, 0.82436063535, 0.4]
"""PPO, clip 0.2 and 0.28, dual clip 3."""
L1_AGGREGATED = {
    "token_mean": -0.389472433769,
    "token_sum": -1.947362168846,
    "seq_mean_token_sum": -0.973681084423,
    "seq_mean_token_sum_norm": -0.324560361474,
    "seq_mean_token_mean": -0.222530308528,
}
L2_RATIOS = [1.068939105747, 1.0]
L2_SEQ_MEAN_TOKEN_MEAN = -0.2502
L3_TOKEN_MEAN = 0.546680551632
L3_BOUND_5_TOKEN_MEAN = 0.53763701544
L4_SEQ_MEAN_TOKEN_MEAN = -0.556865142022
L4_TOKEN_MEAN = -0.87055354725
L5_SEQ_MEAN = -0.27165177878
L6_TOKENS = [1.22140275816, 0.0, 1.340640092071, -0.16487212707, -0.454897994784]
L6_TOKEN_MEAN = 0.388454545675
L7_TOKEN_MEAN = -0.189692065752
L8_SUM = -2.255921536631
L9_TOKEN_MEAN = 0.656968955944
L10_TOKEN_MEAN = 0.5386
L11_TOKEN_MEAN = 0.367469524916
L12_TOKEN_MEAN = 0.537636907912
"""Over 5 + 1e-6 tokens."""
L13_MEAN = 0.265
"""Clip 0.2, values 0.5 and 0.9, old values 0.4 and 0.4, returns 1 and 0."""

K1_AT_PLUS = {"k1": 0.5, "k2": 0.125, "k3": 0.106530659713}
"""At d = 0.5."""
K1_AT_MINUS = {"k1": -0.5, "k2": 0.125, "k3": 0.1487212707}
K2_BOUNDED = 10.0
"""k3 at d = -30."""
K2_UNBOUNDED = 10686474581493.463
"""What others give there."""
K3_TOKEN_MEAN = 0.024275282772
K4_TOKEN_MEAN = 0.018601545952
K6_SLOPES = {"k1": 1.0, "k2": 0.5, "k3": 0.393469340287, "k3_straight_through": 0.5}
"""At d = 0.5."""

O1_RATIOS = [0.904837418036, 1.6487212707, 1.0, 1.0, 0.496585303791]
O2_TRUNCATED = [0.904837418036, 1.5, 1.0, 1.0, 0.496585303791]
O3_MASKED = [0.904837418036, 0.0, 1.0, 1.0, 0.0]
O4_PRODUCTS = [1.491824697641, 0.496585303791]
O4_GEOMETRIC_MEANS = [1.142630811796, 0.704688089719]
O5_SEQUENCE_MASKED = [0.0, 0.496585303791]
O6_TOKEN_MEAN = -0.534499241449
O8 = {"kl": 0.06, "k3": 0.070028798505, "chi2": 0.156721909096}
O10_TOKEN_MEAN = -0.146626038162

N1_TOKEN_MEAN, N1_MEAN_OF_MEANS = 2.0, 3.0
"""Losses 1, 1, 1 in one micro-batch (or rank) and 5 in another; N2 are the same numbers."""

T1_RAW, T1_SCALED, T1_PROCESSED = -1.440189698561, -1.699245259261, -1.643401346357
T1_KEPT_MASS = 0.945686733867
"""Logits 2, 1, 0, -1, token 1, at temperature 1 and 0.7."""
