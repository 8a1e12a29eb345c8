"""Reference values in float64 of advantages (A), losses (L), KL (K), off-policy corrections (O), temperature
and support (T), staleness (S) and normalization (N), and results of other systems that must not be ours.

Inputs of L1 to L12, K3, K4 and O1 to O10 are in `L0_inputs`: [row][token], mask 1 = trained on.
"""

from typing import Any

CASES: dict[str, dict[str, Any]] = {
    # grpo_verl(eps1e-6,ddof1)
    "A1": {
        "inp": {"rewards": [1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0], "group": [0, 0, 0, 0, 1, 1, 1, 1]},
        "out": [1.305579692401, -0.78334781544, -0.78334781544, 0.26111593848, 0.0, 0.0, 0.0, 0.0],
    },
    # grpo_trl(eps1e-4,ddof1)
    "A2": {"out": [1.305309749354, -0.783185849612, -0.783185849612, 0.261061949871, 0.0, 0.0, 0.0, 0.0]},
    # grpo_art(eps1e-6,ddof0)
    "A3": {"out": [1.507553086534, -0.90453185192, -0.90453185192, 0.301510617307, 0.0, 0.0, 0.0, 0.0]},
    # openrlhf_group_norm(eps1e-9)
    "A4": {"out": [1.30558241694, -0.783349450164, -0.783349450164, 0.261116483388, 0.0, 0.0, 0.0, 0.0]},
    # drgrpo(no std)
    "A5": {"out": [0.625, -0.375, -0.375, 0.125, 0.0, 0.0, 0.0, 0.0]},
    # rloo
    "A6": {"out": [0.833333333333, -0.5, -0.5, 0.166666666667, 0.0, 0.0, 0.0, 0.0]},
    # nemo_grpo_loo_norm rewards=[1,0,0,.5]
    "A7": {"out": [2.886741345983, -0.999998000004, -0.999998000004, 0.288674634596]},
    # nemo_loo one-hot [1,0,0,0] (others identical)
    "A7b": {"out": [1.0, -0.577349269191, -0.577349269191, -0.577349269191]},
    # singleton reward=0.7
    "A8": {
        "out": {
            "verl/SkyRL grpo": 0.699999300001,
            "verl rloo loop": 0.7,
            "verl rloo_vectorized/SkyRL/TRL": 0.0,
            "prime-rl/tinker/NeMo": 0.0,
            "torchforge (torch.std n=1)": "nan",
        },
    },
    # maxrl SkyRL (r-mu)/(mu+1e-6)
    "A9": {"out": [1.666662222234, -0.99999733334, -0.99999733334, 0.333332444447]},
    # grpo_passk [1,0,0,.5]
    "A10": {"out": [1.044463753921, 0, 0, 0]},
    # opo lens=[4,2,2,8] rewards=[1,0,0,.5]
    "A11": {"out": [0.5, -0.5, -0.5, 0.0], "baseline": 0.5},
    # gpg alpha=bs/nonzero
    "A12": {"out": [0.833333333333, -0.5, -0.5, 0.166666666667, 0.0, 0.0, 0.0, 0.0]},
    # reinforce++ returns gamma=.9 rewards@last mask=[1,1,0,1,1]
    "A13": {
        "verl_carry": [[0.729, 0.81, 0.0, 0.9, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]],
        "skyrl_zeroed": [[0.0, 0.0, 0.81, 0.9, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]],
        "verl_adv": [
            [0.509126217321, 0.682608527639, -0.0, 0.875366650215, 1.089542341965],
            [-1.052214575539, -1.052214575539, -1.052214575539, -0.0, -0.0],
        ],
    },
    # rf++-baseline verl, resp lens [3,1,1,1,1,1,1,1]
    "A14": {
        "out": [
            1.309307297507,
            -1.309307296853,
            -1.309307296853,
            3.27e-10,
            -0.327326823968,
            -0.327326823968,
            -0.327326823968,
            -0.327326823968,
        ],
    },
    # gae gamma=1 lam=.95 r=[0,0,0,1] V=[.5,.4,9,.2] mask=[1,1,0,1] (unwhitened)
    "A15": {
        "carry_verl_NeMo_AReaL": [[0.432, 0.56, 0.8, 0.8]],
        "plain_SkyRL": [[0.8139, 0.962, -8.04, 0.8]],
        "returns_carry": [[0.932, 0.96, 9.8, 1.0]],
    },
    # prime length_penalty(num_output_tokens_weight=.5) r=[1,1,0,1] out=[100,50,80,20]
    "A16": {"out": [0.109375, 0.296875, -0.815625, 0.409375]},
    # OpenTinker grpo_per_step turn_scores=[[.2,.3,1],[0,.5,0]]
    "A17": {
        "out": [
            [0.707105781188, 0.424263468713, 0.0],
            [-0.707105781188, -0.707105781188, -1.414211562376],
        ],
    },
    # dapo overlong max=100 buf=20 factor=1 len=[70,80,90,100]
    "A18": {"out": [0.0, 0.0, -0.5, -1.0]},
    "L0_inputs": {
        "lp": [[-1.0, -0.5, -2.0], [-0.2, -1.5, 0.0]],
        "old": [[-1.2, -0.9, -1.6], [-0.7, -1.0, 0.0]],
        "adv": [[1.0, 1.0, 1.0], [-0.5, -0.5, -0.5]],
        "mask": [[1, 1, 1], [1, 1, 0]],
        "rollout": [[-1.1, -1.4, -1.6], [-0.7, -0.3, 0.0]],
        "ref": [[-1.1, -0.4, -2.5], [-0.3, -1.5, 0.0]],
    },
    # ppo_clip eps_lo=.2 eps_hi=.28 dual_c=3 (per token)
    "L1": {"out": [[-1.22140275816, -1.28, -0.670320046036], [0.82436063535, 0.4, 0.5]]},
    "L1_agg": {
        "token-mean": -0.389472433769,
        "token-sum": -1.947362168846,
        "seq-mean-token-sum": -0.973681084423,
        "seq-mean-token-sum-norm(L=3)": -0.324560361474,
        "seq-mean-token-mean": -0.222530308528,
    },
    # trl dr_grpo (B*max_completion_length=2*3)
    "L1b": {"out": -0.324560361474},
    # dual clip demo A=-1 lp-old=ln(5)
    "L1c": {"no_dual": 5.0, "dual_c3": 3.0},
    # gspo seq ratio, eps_lo=3e-4 eps_hi=4e-4
    "L2": {"seq_ratio": [1.068939105747, 1.0], "loss_seq_mean_token_mean": -0.2502},
    # cispo
    "L3": {
        "verl/SkyRL/NeMo/slime/AReaL clip[.8,1.28] token-mean": 0.546680551632,
        "TRL max=5.0 (epsilon_high IS the bound) token-mean": 0.53763701544,
    },
    # sapo tau+=1 tau-=1.05
    "L4": {"seq-mean-token-mean": -0.556865142022, "token-mean": -0.87055354725},
    # gmpo(geo_mean) clip +-.4 (log space)
    "L5": {"out": -0.27165177878},
    # dppo_tv verl delta=.15 trunc 20
    "L6": {
        "out": 0.388454545675,
        "per_token": [[1.22140275816, 0.0, 1.340640092071], [-0.16487212707, -0.454897994784, 0.0]],
    },
    # prime-rl default (DPPO-TV .2/.2 + 1e-3*logratio^2; ratio vs ROLLOUT logprobs; /global tokens)
    "L7": {"out": -0.189692065752},
    # importance_sampling (tinker/SkyRL, SUM reduction, vs old)
    "L8": {"out": -2.255921536631},
    # reinforce+IS torchforge ReinforceLoss clamp[.1,10] vs rollout
    "L9": {"out": 0.656968955944},
    # dro beta=.1 token-mean
    "L10": {"out": 0.5386},
    # vespo TRL defaults (no vLLM IS) token-mean
    "L11": {"out": 0.367469524916},
    # art default eps=1 eps_high=4 weight=1
    "L12": {"out": 0.537636907912},
    # value loss clip .2 V=[.5,.9] Vold=[.4,.4] R=[1,0]
    "L13": {"out": 0.265},
    # kl estimators d=lp-ref=0.5
    "K1": {"k1": 0.5, "abs": 0.5, "k2": 0.125, "k3": 0.106530659713},
    # d=-0.5
    "K1b": {"k1": -0.5, "abs": 0.5, "k2": 0.125, "k3": 0.1487212707},
    # k3 clamp d=-30
    "K2": {
        "verl/SkyRL (in +-20, out +-10)": 10.0,
        "NeMo(in 20,out 10)": 10.0,
        "OpenRLHF/AReaL(out +-10)": 10.0,
        "slime k3 / TRL: unclamped": 10686474581493.463,
    },
    # k3 token-mean lp vs ref
    "K3": {"out": 0.024275282772},
    # bias-corrected k3 (DeepSeek-V3.2) = ratio*k3 token-mean
    "K4": {"out": 0.018601545952},
    # adaptive KL ctl init=.2 target=6 horizon=10000 cur_kl=9 n=256
    "K5": {"out": 0.201024},
    # grad d/dlp: k1=1,k2=d,k3=1-exp(-d), k3+=d  at d=.5
    "K6": {"k1": 1.0, "k2": 0.5, "k3": 0.393469340287, "k3plus": 0.5},
    # token ratio pi_old/pi_rollout
    "O1": {"out": [[0.904837418036, 1.6487212707, 1.0], [1.0, 0.496585303791, 1.0]]},
    # TIS token C=1.5
    "O2": {"out": [[0.904837418036, 1.5, 1.0], [1.0, 0.496585303791, 1.0]]},
    # IcePop [.5,1.5] -> 0 outside
    "O3": {"out": [[0.904837418036, 0.0, 1.0], [1.0, 0.0, 1.0]]},
    # seq product ratio / geometric mean
    "O4": {"product": [1.491824697641, 0.496585303791], "geo": [1.142630811796, 0.704688089719]},
    # MIS TRL sequence_mask C_max=1.4 -> ratio or 0
    "O5": {"out": [0.0, 0.496585303791]},
    # ppo * TIS(C=1.5) token-mean
    "O6": {"out": -0.534499241449},
    # batch-norm factor of token TIS C=1.5
    "O7": {"mean": 0.980284544365},
    # mismatch kl(k1)=mean(rollout-old); k3=E[r-logr-1]; chi2_token=E[r^2]-1; ESS=1/E[(w/mean w)^2]
    "O8": {"k1": 0.06, "k3": 0.070028798505, "chi2": 0.156721909096},
    # OPSM (keep if A>=0 or mean(rollout-lp)<=delta) delta=.1
    "O9": {"seq_kl": [-0.2, 0.35], "keep": [1, 0]},
    # AReaL decoupled: loss=ppo(lp,prox=old)*exp(old-rollout), denominator=ORIGINAL token count
    # (mask>1.5 filtered)
    "O10": {"out": -0.146626038162},
    # logits=[2,1,0,-1] T=.7 token1: raw(T=1), scaled, top_p=.9 keeps {0,1}
    "T1": {
        "raw": -1.440189698561,
        "scaled": -1.699245259261,
        "kept_mass": 0.945686733867,
        "processed": -1.643401346357,
        "spurious_IS_ratio": 0.945686733867,
    },
    # AReaL capacity eta=2 B=4 maxc=64: v=0 acc=0 run=0; v=3 acc=12 run=8; after recover v=10 acc=0(bug)
    # vs acc=40
    "S1": {"out": [12, 4, 52, 12]},
    # micro-batch [1,1,1],[5]
    "N1": {"correct_token_mean": 2.0, "mean_of_microbatch_means": 3.0},
    # DP ranks tokens 3 vs 1, FSDP averages: local denom vs global denom*dp
    "N2": {"local_denom": 3.0, "global_denom": 2.0},
}
