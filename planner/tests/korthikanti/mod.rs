//! Bytes by the formulas of Korthikanti et al., arXiv 2205.05198, sections 4 and 5, for its models.

/// A model of table 3.
pub struct PublishedModel {
    pub name: &'static str,
    /// Heads, hidden size, layers.
    pub sizes: [f64; 3],
    /// Samples of a micro-batch, pipeline stages, chunks of a stage.
    pub layout: [f64; 3],
    /// Figure 1, GiB: parameters and optimizer; activations without anything, and with sequence parallelism and
    /// selective recomputation.
    pub figure_1: [f64; 3],
    /// Figure 7, percent of tensor parallelism: sequence parallelism, selective recomputation, both, full recomputation.
    pub figure_7: [f64; 4],
}

/// Table 3, with figures 1 and 7.
pub const MODELS: [PublishedModel; 4] = [
    PublishedModel {
        name: "22B",
        sizes: [64.0, 6144.0, 48.0],
        layout: [4.0, 1.0, 1.0],
        figure_1: [45.56, 59.25, 9.56],
        figure_7: [66.84, 49.42, 16.18, 7.64],
    },
    PublishedModel {
        name: "175B",
        sizes: [96.0, 12288.0, 96.0],
        layout: [1.0, 8.0, 3.0],
        figure_1: [45.56, 66.84, 12.35],
        figure_7: [62.04, 56.53, 18.49, 8.71],
    },
    PublishedModel {
        name: "530B",
        sizes: [128.0, 20480.0, 105.0],
        layout: [1.0, 35.0, 3.0],
        figure_1: [31.64, 114.02, 23.08],
        figure_7: [58.31, 62.04, 20.27, 9.42],
    },
    PublishedModel {
        name: "1T",
        sizes: [160.0, 25600.0, 128.0],
        layout: [1.0, 64.0, 1.0],
        figure_1: [32.96, 131.25, 26.56],
        figure_7: [58.31, 62.04, 20.27, 9.42],
    },
];

/// Tensor-parallel size and sequence length of all.
const TENSOR: f64 = 8.0;
const SEQ_LENGTH: f64 = 2048.0;
/// Bytes of a parameter: weight in 16 bits, gradient and master weight in f32, two moments in f32.
const STATES: f64 = 18.0;
const GIB: f64 = (1_u64 << 30) as f64;

/// The forms of table 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saving {
    /// Tensor parallelism alone.
    Tensor,
    /// And sequence parallelism.
    Sequence,
    /// And selective recomputation.
    Selective,
    /// And both.
    Both,
    /// Full recomputation.
    Full,
}

impl PublishedModel {
    /// Bytes that a layer keeps of a micro-batch: table 2.
    pub fn layer_bytes(&self, saving: Saving) -> f64 {
        let [heads, hidden, _] = self.sizes;
        let sbh = SEQ_LENGTH * self.layout[0] * hidden;
        let scores = 5.0 * heads * SEQ_LENGTH / hidden;
        match saving {
            Saving::Tensor => sbh * (10.0 + 24.0 / TENSOR + scores / TENSOR),
            Saving::Sequence => sbh / TENSOR * (34.0 + scores),
            Saving::Selective => sbh * (10.0 + 24.0 / TENSOR),
            Saving::Both => sbh / TENSOR * 34.0,
            Saving::Full => 2.0 * sbh,
        }
    }

    /// GiB of the activations of the first stage, which has p micro-batches in flight, and more with chunks: section 4.2.3.
    pub fn activations(&self, saving: Saving) -> f64 {
        let [_, stages, chunks] = self.layout;
        let interleaved = if chunks > 1.0 { 1.0 + (stages - 1.0) / (stages * chunks) } else { 1.0 };
        self.layer_bytes(saving) * self.sizes[2] * interleaved / GIB
    }

    /// GiB of the weights, gradients and optimizer state of a rank's layers: 12 h^2 parameters each.
    pub fn states(&self) -> f64 {
        let [_, hidden, layers] = self.sizes;
        STATES * 12.0 * layers * hidden * hidden / (TENSOR * self.layout[1]) / GIB
    }
}
