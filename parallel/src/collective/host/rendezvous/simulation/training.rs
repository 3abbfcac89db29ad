//! The program of the ranks of a simulated job: three steps, a checkpoint, and the end.

use ferrotron_tensor::{Error, Result};
use tokio::time::sleep;

use super::faults::{Fault, Phase};
use super::rank::{Member, Rank, Team};

/// Steps of a job.
const STEPS: usize = 3;

/// Runs the program on one rank.
pub async fn train(rank: &mut Rank, member: Member) -> Result<()> {
    let (own, size, row) = (rank.rank, rank.scenario.size, rank.scenario.row);
    let first = own / row * row;
    let mut world = member.team("world", &(0..size).collect::<Vec<_>>());
    let mut rows = member.team("row", &(first..first + row).collect::<Vec<_>>());
    let mut columns = member.team("column", &(own % row..size).step_by(row).collect::<Vec<_>>());
    rank.reach(Phase::Start).await?;
    for step in 0..STEPS {
        if step == 1 {
            rank.reach(Phase::Steps).await?;
        }
        rank.compute().await;
        let disagrees = rank.has(|fault| matches!(*fault, Fault::Disagrees(rank) if rank == own));
        rows.sum(if step == 1 && disagrees { 5 } else { 4 }).await?;
        columns.sum(300).await?;
        world.any(false).await?; // whether to stop
    }
    rank.save(&mut world).await?;
    rank.reach(Phase::End).await
}

impl Rank {
    /// Saves as the trainer does: shares first, then all agree, then rank 0 publishes.
    async fn save(&mut self, world: &mut Team) -> Result<()> {
        let own = self.rank;
        self.reach(Phase::Save).await?;
        self.compute().await;
        let is_full = self.has(|fault| matches!(*fault, Fault::DiskFull(rank) if rank == own));
        if !is_full && self.host.lives() {
            *self.disk.lock().unwrap().shares.entry(own).or_default() += 1;
        }
        if world.any(is_full).await? {
            return Err(Error::communication("save", "a rank's disk is full"));
        }
        if own == 0 {
            let disk = &mut *self.disk.lock().unwrap();
            disk.published = Some(disk.shares.len());
        }
        world.all().await
    }

    async fn compute(&mut self) {
        sleep(self.scenario.work.mul_f64(self.dice.share())).await;
    }

    fn has(&self, is: impl Fn(&Fault) -> bool) -> bool {
        self.scenario.has(is)
    }

    /// Does what the scenario has in store for this rank here.
    async fn reach(&self, phase: Phase) -> Result<()> {
        let here = |rank, at| (rank, at) == (self.rank, phase);
        if self.has(|fault| matches!(*fault, Fault::Hangs(rank, at) if here(rank, at))) {
            std::future::pending::<()>().await;
        }
        if self.has(|fault| matches!(*fault, Fault::Fails(rank, at) if here(rank, at))) {
            return Err(Error::communication("program", "it is wrong"));
        }
        Ok(())
    }
}
