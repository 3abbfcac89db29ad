//! The choice of the next token from its logits: temperature, top-k and top-p.

use ferrotron_tensor::{Error, RandomKey, Result};

/// The rule by which the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Choose among this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Choose among the fewest likeliest tokens that together have at least this probability. This is nucleus sampling
    /// (Holtzman et al., arXiv 1904.09751), applied after top-k, as in transformers.
    pub top_p: Option<f64>,
    /// Seed of the choice, which is a function of it and the token's position.
    pub seed: u64,
    /// The token that ends a text: generation stops where it is chosen, without it.
    pub end_of_text: Option<u32>,
}

impl Sampling {
    /// Always the likeliest token.
    pub const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 0, end_of_text: None };

    /// Checks the numbers.
    ///
    /// # Errors
    /// One that is out of range, with the option that sets it.
    pub fn validate(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::config("generate", message));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse(format!(
                "--temperature must be at least 0 and finite, got {}",
                self.temperature
            ));
        }
        if self.top_k == Some(0) {
            return refuse("--top-k must be at least 1, got 0".into());
        }
        match self.top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => {
                refuse(format!("--top-p must be above 0 and at most 1, got {p}"))
            }
            _ => Ok(()),
        }
    }

    /// The token chosen from `logits` at `position`. A constant added to all logits changes nothing but by rounding.
    pub fn choose(&self, logits: &[f64], position: u64) -> u32 {
        let likeliest =
            || (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        if self.temperature == 0.0 {
            return likeliest() as u32;
        }
        let likelier = |&a: &usize, &b: &usize| logits[b].total_cmp(&logits[a]).then(a.cmp(&b));
        let mut order: Vec<usize> = (0..logits.len()).collect();
        if let Some(k) = self.top_k.filter(|&k| k < order.len()) {
            order.select_nth_unstable_by(k - 1, likelier);
            order.truncate(k);
        }
        let largest = order.iter().map(|&i| logits[i]).fold(f64::NEG_INFINITY, f64::max);
        let weight = |&i: &usize| ((logits[i] - largest) / self.temperature).exp();
        let total: f64 = order.iter().map(weight).sum();
        let uniform = RandomKey::new(self.seed, 0, "generate").uniform(position);
        // Only the likeliest tokens that together have so much are sorted: as a rule few of a vocabulary.
        let enough = self.top_p.unwrap_or(uniform) * total;
        let (mut weights, mut sum) = (Vec::new(), 0.0);
        while weights.len() < order.len() && sum <= enough {
            let sorted = weights.len();
            let next = (4 * sorted).clamp(64, order.len().max(64)).min(order.len());
            order[sorted..].select_nth_unstable_by(next - 1 - sorted, likelier);
            order[sorted..next].sort_unstable_by(likelier);
            weights.extend(order[sorted..next].iter().map(weight));
            sum = weights.iter().sum();
        }
        let mut left = uniform * total;
        if self.top_p.is_some() {
            let sums =
                weights.iter().scan(0.0, |sum, weight| Some(std::mem::replace(sum, *sum + weight)));
            let kept = sums.take_while(|&before| before < enough).count();
            weights.truncate(kept);
            left = uniform * weights.iter().sum::<f64>();
        }
        for (&token, weight) in order.iter().zip(&weights) {
            left -= weight;
            if left < 0.0 {
                return token as u32;
            }
        }
        order[weights.len() - 1] as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_follow_their_definitions() {
        let logits = [0.0, 2.0, 1.0, -1.0];
        let with =
            |top_k, top_p| Sampling { temperature: 1.0, top_k, top_p, seed: 7, end_of_text: None };
        let chosen = |sampling: Sampling| {
            let mut counts = [0; 4];
            (0..4000).for_each(|position| counts[sampling.choose(&logits, position) as usize] += 1);
            counts
        };
        let sum: f64 = logits.iter().map(|x: &f64| x.exp()).sum();
        for (count, logit) in chosen(with(None, None)).iter().zip(logits) {
            let p = logit.exp() / sum;
            // Five standard deviations of a binomial count.
            assert!((f64::from(*count) - 4000.0 * p).abs() < 5.0 * (4000.0 * p * (1.0 - p)).sqrt());
        }
        assert_eq!(chosen(with(Some(1), None)), [0, 4000, 0, 0]);
        let [zero, one, two, three] = chosen(with(Some(2), None));
        assert!(zero == 0 && three == 0 && one > two && two > 0);
        // Tokens 1 and 2 have 0.64 and 0.24 of the probability: both are needed for 0.7.
        let [zero, one, two, three] = chosen(with(None, Some(0.7)));
        assert!(zero == 0 && three == 0 && one > two && two > 0);
        assert_eq!(chosen(with(None, Some(0.5))), [0, 4000, 0, 0]);
        assert_eq!(chosen(with(None, None)), chosen(with(None, None)));
    }

    /// Choices over a vocabulary of which a part is sorted are those of sorting all of it.
    #[test]
    fn sorting_a_part_chooses_as_sorting_all() {
        let logit = |i: u64| 6.0 * RandomKey::new(5, 0, "logits").uniform(i);
        let logits: Vec<f64> = (0..3000).map(|i| (8.0 * logit(i)).round() / 8.0).collect(); // with ties
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        for temperature in [0.3, 1.0, 3.0] {
            for (top_k, top_p) in [
                (None, None),
                (Some(700), None),
                (None, Some(0.9)),
                (Some(700), Some(0.5)),
                (Some(5000), None),
            ] {
                let sampling = Sampling { temperature, top_k, top_p, seed: 3, end_of_text: None };
                let kept = &order[..top_k.unwrap_or(3000).min(3000)];
                let weight = |&i: &usize| ((logits[i] - logits[order[0]]) / temperature).exp();
                let mut weights: Vec<f64> = kept.iter().map(weight).collect();
                if let Some(p) = top_p {
                    let (enough, mut sum) = (p * weights.iter().sum::<f64>(), 0.0);
                    let first = weights.iter().position(|weight| {
                        sum += weight;
                        sum >= enough
                    });
                    weights.truncate(first.expect("all is enough") + 1);
                }
                for position in 0..200 {
                    let uniform = RandomKey::new(3, 0, "generate").uniform(position);
                    let mut left = uniform * weights.iter().sum::<f64>();
                    let at = weights.iter().position(|weight| {
                        left -= weight;
                        left < 0.0
                    });
                    let want = kept[at.unwrap_or(weights.len() - 1)] as u32;
                    assert_eq!(
                        sampling.choose(&logits, position),
                        want,
                        "{sampling:?}, {position}"
                    );
                }
            }
        }
    }
}
