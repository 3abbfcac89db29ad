//! Time limits in which a pause of the whole process does not count: a job that was stopped for longer than its timeout
//! goes on.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Shortest pause that is none of a busy machine.
const PAUSE: Duration = Duration::from_secs(1);

/// Parts in which a long limit is waited for.
const PARTS: u32 = 20;

/// Waits for `future`, at most for `limit`. Returns none if that is over. A pause of this process counts for nothing if it
/// is longer than a second and a twentieth of the limit, which it is then noticed by.
pub async fn awake_for<F: Future>(limit: Duration, future: F) -> Option<F::Output> {
    awake_in_parts(limit, (limit / PARTS).max(PAUSE), future).await
}

async fn awake_in_parts<F: Future>(
    limit: Duration,
    part: Duration,
    future: F,
) -> Option<F::Output> {
    let (mut future, mut left) = (pin!(future), limit);
    loop {
        let (begun, asked) = (Instant::now(), left.min(part));
        if let Ok(output) = timeout(asked, &mut future).await {
            return Some(output);
        }
        let took = begun.elapsed();
        left = left.saturating_sub(if took > asked + part { asked } else { took.max(asked) });
        if left.is_zero() {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::runtime::Builder;
    use tokio::time::sleep;

    /// Nothing else runs on the thread of this runtime while it sleeps, as in a process that is stopped.
    #[test]
    fn a_pause_of_the_process_is_no_time() {
        let [limit, part] = [300, 30].map(Duration::from_millis);
        let stopped = async {
            sleep(part / 3).await;
            std::thread::sleep(2 * limit);
            sleep(limit / 2).await;
            7
        };
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        assert_eq!(runtime.block_on(awake_in_parts(limit, part, stopped)), Some(7));
        let begun = Instant::now();
        let never = runtime.block_on(awake_in_parts(limit, part, std::future::pending::<()>()));
        assert!(never.is_none() && begun.elapsed() >= limit);
        assert_eq!(runtime.block_on(awake_for(Duration::MAX, async { 8 })), Some(8));
    }
}
