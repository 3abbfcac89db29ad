//! Which rank of several this process is.

use ferrotron::Result;
use ferrotron::parallel::launch::RankEnvironment;

/// Which rank of several this process is, by its environment.
pub fn rank_environment() -> Result<Option<RankEnvironment>> {
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let found = RankEnvironment::from_variables(&variables.collect())?;
    Ok(found.filter(|found| found.world_size > 1))
}
