"""Plain torch versions of the Triton kernels that a Qwen4-Exp forward launches in SGLang 0.5.23, one module a
subject.

Names and arguments are SGLang's. They compute in fp32 and return the input dtype, and serve what greedy
serving without speculation needs; anything else raises NotImplementedError rather than guessing. State
layouts are SGLang's: GDN states [slots, value heads, V, K], convolution states [slots, channels, width - 1].
"""
