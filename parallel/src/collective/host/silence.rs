//! Ranks that do not answer: their processes are stopped, or their machines hang.
//!
//! A rank that merely waits answers, since its progress thread does. So where calls wait for each other in a chain,
//! the one at its end is known.

/// Returns the reason why a call or a group waits, if a rank does not answer.
pub fn blame(silent: &[usize]) -> Option<String> {
    let verb = if silent.len() == 1 { "does" } else { "do" };
    let named = list(silent.iter().copied());
    (!silent.is_empty())
        .then(|| format!("{named} {verb} not answer: look for a process that is stopped or stuck"))
}

/// Maximum number of ranks that are named.
const NAMED: usize = 8;

/// Returns "rank 3", or "ranks 3, 5", of the first few.
pub fn list(ranks: impl Iterator<Item = usize>) -> String {
    let ranks: Vec<_> = ranks.take(NAMED).map(|rank| rank.to_string()).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, ranks.join(", "))
}
