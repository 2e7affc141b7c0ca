//! What layers that predict further tokens take in.

/// The first step of a layer that predicts the token behind the next one (multi-token prediction,
/// DeepSeek-V3, arXiv 2412.19437, section 2.2): of a column at position p whose token at p + 1 is
/// known,
///
/// ```text
/// output = W · [norm(table[token at p + 1]); norm(end(input))]
/// ```
///
/// `end` is the norm behind the last layer of what the input comes from. A column of a further
/// draft goes on from another one's output, a position later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MtpIn {
    /// `[vocab, hidden]`, shared by the lanes.
    pub table: u32,
    /// RMSNorm scale of the embedding, `[hidden]`.
    pub embedding_norm: u32,
    /// The same of the input.
    pub hidden_norm: u32,
    /// `end`: behind a pass of the model, and behind one of drafts.
    pub end_norms: [u32; 2],
    /// `[hidden, 2 * hidden]`, shared by the lanes: columns of the embedding, then of the input.
    pub weight: u32,
    /// Residual streams, all lanes with the same numbers.
    pub input: u32,
    /// The same.
    pub output: u32,
    /// Which block does which rows.
    pub partition: u32,
}
