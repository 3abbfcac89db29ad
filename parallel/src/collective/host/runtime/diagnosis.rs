//! Finds out why a call does not end: which ranks have not entered it, and which do not answer.

use std::time::Duration;
use tokio::time::sleep;

use crate::collective::Call;
use crate::collective::host::runtime::census::{Census, Members, Query};
use crate::collective::host::runtime::group_task::GroupTask;
use crate::collective::host::runtime::world_health::{Answer, Entry, Kind};
use crate::collective::host::silence::{blame, list};

/// Time within which a rank that closes its channels must say why.
const GRACE: Duration = Duration::from_millis(300);

/// Parts of the timeout, for one of which a call waits whose missing ranks wait for others.
pub const OTHERS_FIRST: u32 = 8;

impl GroupTask {
    /// The entries that single ranks, by their numbers in the world, must have made for a call to end.
    fn awaited(&self, entries: &[Entry]) -> Vec<(usize, Entry)> {
        let own = self.links.rank;
        let of_one = |&Entry { kind, number }: &Entry| match kind {
            Kind::Call => None,
            Kind::Sent(to) => Some((self.ranks[to], Entry { kind: Kind::Received(own), number })),
            Kind::Received(from) => {
                Some((self.ranks[from], Entry { kind: Kind::Sent(own), number }))
            }
        };
        entries.iter().filter_map(of_one).collect()
    }

    /// Waits until the reason why a rank has closed its pipes should have come. All have been asked, and the rank has
    /// answered, or its parent in the tree for one that has left, or there was no answer for long. Tells the ranks that
    /// do not answer; the one that has gone may have waited for them.
    pub(super) async fn wait_for_reason(&self) -> Census {
        // It takes leave, and says a moment after it has closed its pipes if that was for an error.
        sleep(GRACE).await;
        self.rendezvous.census(None).await
    }

    /// Names the ranks that this call has waited for in vain.
    pub(super) async fn diagnose(&self, call: &Call, entries: &[Entry]) -> String {
        let questions = self.awaited(entries);
        let all = entries.iter().copied().find(|entry| entry.kind == Kind::Call);
        let members = || Members::new(&self.ranks);
        let query = all.map(|entry| Query { group: self.id, members: members(), entry });
        let (replies, census) =
            tokio::join!(self.rendezvous.ask(self.id, &questions), self.rendezvous.census(query));
        let mut unheard = Vec::new();
        let mut asked = Vec::new();
        for ((rank, entry), reply) in questions.into_iter().zip(replies) {
            match reply {
                Some(answer) if !answer.entered => asked.push((rank, entry, answer)),
                Some(_) => {}
                None => unheard.push(rank),
            }
        }
        let counted = census.missing.into_iter().map(|(rank, answer)| (rank, entries[0], answer));
        let (silent, missing) =
            (census.silent, asked.into_iter().chain(counted).collect::<Vec<_>>());
        // Ranks that wait themselves know better for whom: they have waited nearly as long.
        if silent.is_empty()
            && !missing.is_empty()
            && missing.iter().all(|(.., answer)| answer.waits)
        {
            sleep(self.timeout / OTHERS_FIRST).await;
        }
        let (op, name, me) = (call.op.name(), &self.name, self.ranks[self.links.rank]);
        let (entry, limit) = (entries[0], self.timeout);
        // A rank that does not answer, in whatever group: those who are missing here may wait for it.
        let silent = blame(&silent).map(|silent| format!("and {silent}"));
        let (Some((_, awaited, _)), None) = (missing.first(), &silent) else {
            let unreached =
                self.rendezvous.unreached(self.id).map(|stands| format!("where {stands}"));
            let unheard = (!unheard.is_empty())
                .then(|| format!("and {} did not say whether it has", list(unheard.into_iter())));
            let why = silent.or(unreached).or(unheard).unwrap_or_else(|| {
                "though all ranks entered it: allow more time, or look for a rank that is stuck"
                    .into()
            });
            return format!(
                "{op}: {entry} of group {name} ({call}) did not end within {limit:?} on rank {me}, {why}"
            );
        };
        let last: Vec<_> = missing
            .iter()
            .map(
                |(rank, _, Answer { last, .. })| {
                    if missing.len() == 1 { last.clone() } else { format!("rank {rank}: {last}") }
                },
            )
            .collect();
        format!(
            "{op}: {} did not enter {awaited} of group {name} ({call}) within {limit:?} of rank {me}; {}",
            list(missing.iter().map(|(rank, ..)| *rank)),
            last.join("; ")
        )
    }
}
