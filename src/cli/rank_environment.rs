//! Finds the rank of this process.

use ferrotron::Result;
use ferrotron::parallel::launch::RankEnvironment;

/// The rank of this process in its job, by its environment; `None` if it is alone.
pub fn rank_environment() -> Result<Option<RankEnvironment>> {
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let found = RankEnvironment::from_variables(&variables.collect())?;
    Ok(found.filter(|found| found.world_size > 1))
}
