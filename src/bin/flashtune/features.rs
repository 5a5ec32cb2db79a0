//! A problem's features as the user asks for them, in an option or a line of a problem file.

use flashtune::problem::{BlockMask, Causal, Features, Pass, Problem, Varlen, Window};

#[derive(Clone, Copy, Default, clap::Args)]
pub struct FeatureArgs {
    /// Keys before its diagonal that a query sees; all if not given
    #[arg(long, value_name = "N")]
    pub window_left: Option<i64>,
    /// Keys after its diagonal that a query sees; all if not given
    #[arg(long, value_name = "N")]
    pub window_right: Option<i64>,
    /// A soft cap of the scores
    #[arg(long)]
    pub softcap: bool,
    /// ALiBi slopes
    #[arg(long)]
    pub alibi: bool,
    /// A tensor that is added to the scores
    #[arg(long)]
    pub bias: bool,
    /// Backward: the gradient of the bias
    #[arg(long)]
    pub dbias: bool,
    /// A tensor of bytes that says which keys are seen
    #[arg(long)]
    pub mask: bool,
    /// A tensor of bits that says it
    #[arg(long, conflicts_with = "mask")]
    pub mask_bits: bool,
    /// A score of each head to no key
    #[arg(long)]
    pub sinks: bool,
    /// Backward: a gradient into the LSE
    #[arg(long)]
    pub dlse: bool,
    /// Sequences end to end, each as long as the longest
    #[arg(long)]
    pub varlen: bool,
    /// Forward: keys of a page, where k and v are pages
    #[arg(long, value_name = "N")]
    pub page_size: Option<i64>,
    /// A block mask, of blocks of N queries and N keys
    #[arg(long, value_name = "N")]
    pub block_mask: Option<i64>,
}

impl FeatureArgs {
    /// The problem with these features; what belongs to the backward pass only there.
    pub fn on(self, problem: Problem) -> Problem {
        let is_backward = problem.pass == Pass::Backward;
        let total = |seqlen: i64| Some(problem.batch_size.saturating_mul(seqlen));
        // Lengths of sequences in pages are what says how many of them are used.
        let total_k = if self.page_size.is_some() { None } else { total(problem.seqlen_k) };
        let varlen = Varlen { total_q: total(problem.seqlen_q), total_k, ..Varlen::default() };
        let window = match (self.window_left, self.window_right) {
            (None, None) => Window::default(),
            (left, right) => Window { left, right, top_left: problem.causal == Causal::TopLeft },
        };
        let features = Features {
            window,
            softcap: self.softcap,
            alibi: self.alibi,
            bias: self.bias,
            dbias: self.dbias && is_backward,
            mask: self.mask || self.mask_bits,
            mask_bits: self.mask_bits,
            sinks: self.sinks,
            dlse: self.dlse && is_backward,
            varlen: self.varlen.then_some(varlen),
            paged: self.page_size,
            block_mask: self.block_mask.map(|size| BlockMask { block_q: size, block_k: size }),
        };
        Problem { features, ..problem }
    }
}
