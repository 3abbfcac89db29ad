//! Entropy of a token stream, a baseline for training losses.
//!
//! A model that uses the previous token, and nothing else, reaches the bigram entropy. A loss **below** it therefore
//! shows that the model uses longer context. Values are in nats per token, the unit of the cross-entropy loss (divide
//! by ln 2 for bits).
//!
//! It is the entropy of the stream's own counts: the lowest loss that any bigram table can reach on this stream, even
//! if fitted to it. With a large vocabulary and a short text most pairs occur once, and the bigram entropy approaches
//! zero, so it says little.

/// `H(next | previous) = -sum p(a, b) ln p(b | a)` of adjacent pairs, in nats. 0 for fewer than two tokens. Takes 8
/// bytes of memory per token.
///
/// ```
/// use ferrotron_data::entropy::bigram_entropy;
/// assert_eq!(bigram_entropy(&[7, 9, 7, 9, 7]), 0.0); // the previous token says it all
/// ```
pub fn bigram_entropy(tokens: &[u32]) -> f64 {
    let pairs = counts(tokens.windows(2).map(|pair| u64::from(pair[0]) << 32 | u64::from(pair[1])));
    let total = tokens.len().saturating_sub(1) as f64;
    // Pairs are sorted, so those with equal first tokens are adjacent.
    pairs
        .chunk_by(|a, b| a.0 >> 32 == b.0 >> 32)
        .map(|rows| {
            let n: u64 = rows.iter().map(|row| row.1).sum();
            n as f64 / total * entropy(rows.iter().map(|row| row.1), n)
        })
        .sum()
}

/// Distinct keys in ascending order with their counts. Sorted instead of hashed, so that the sums above are
/// deterministic.
fn counts(keys: impl Iterator<Item = u64>) -> Vec<(u64, u64)> {
    let mut keys: Vec<u64> = keys.collect();
    keys.sort_unstable();
    keys.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as u64)).collect()
}

/// Entropy of the distribution `count / total`, in nats.
fn entropy(counts: impl Iterator<Item = u64>, total: u64) -> f64 {
    let total = total as f64;
    counts.map(|count| count as f64 / total).map(|p| p * -p.ln()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_tensor::RandomKey;

    #[test]
    fn short_and_constant_streams_have_no_entropy() {
        assert_eq!(bigram_entropy(&[]), 0.0);
        assert_eq!(bigram_entropy(&[3]), 0.0);
        assert_eq!(bigram_entropy(&[3; 10]), 0.0);
    }

    #[test]
    fn values_match_a_sum_by_hand() {
        // Pairs of 0 0 1 0 1: 00 once, 01 twice, 10 once. H(.|0) over 1/3, 2/3; H(.|1) = 0.
        let third = 1.0f64 / 3.0;
        let given_zero = -(third * third.ln() + 2.0 * third * (2.0 * third).ln());
        assert!((bigram_entropy(&[0, 0, 1, 0, 1]) - 0.75 * given_zero).abs() < 1e-15);
    }

    #[test]
    fn independent_tokens_gain_nothing_from_the_previous_one() {
        let key = RandomKey::new(1, 0, "test");
        let tokens: Vec<u32> = (0..100_000).map(|i| key.bits(i) % 4).collect();
        let bigram = bigram_entropy(&tokens);
        // The plug-in bias of m free parameters is m / (2 n), with m = 12; the bound is ten times larger.
        assert!((bigram - 4f64.ln()).abs() < 10.0 * 12.0 / 2e5, "{bigram}");
    }
}
