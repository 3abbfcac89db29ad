//! Reading weights one by one, without a model in memory.

use ferrotron_nn::Param;
use ferrotron_tensor::{Device, Result, ShardSpec, Tensor};

use super::load::Checkpoint;
use super::reader::CheckpointReader;

impl Checkpoint {
    /// Compares names, dims and dtypes with the parameters of a whole model, which may be on a fake device.
    ///
    /// # Errors
    /// Those of [`Checkpoint::load_params`] but for files that cannot be read.
    pub fn check_params(&self, params: &[Param]) -> Result<()> {
        self.check_names(params.iter().map(Param::name))?;
        params.iter().try_for_each(|param| {
            self.find_param(param.name(), param.shard_spec(), param.leaf().dtype()).map(drop)
        })
    }

    /// Reads the value of one parameter, in its dtype. The parameter itself may be on a fake device.
    ///
    /// # Errors
    /// Those of [`Checkpoint::load_params`] about a parameter.
    pub fn read_param(&self, param: &Param, device: &Device) -> Result<Tensor> {
        let (place, dtype) = (param.shard_spec(), param.leaf().dtype());
        let record = self.find_param(param.name(), place, dtype)?;
        let mut value = Tensor::empty(device, dtype, place.dims())?;
        CheckpointReader::new(&self.folder).read(record, place, &mut value)?;
        Ok(value)
    }

    /// All weights, whole, in host memory.
    pub(super) fn whole_weights(&self) -> Result<Vec<(String, Tensor)>> {
        let (host, mut reader) = (Device::cpu(1)?, CheckpointReader::new(&self.folder));
        let weights = self.index.weights();
        weights
            .map(|(name, record)| {
                let mut tensor = Tensor::empty(&host, record.dtype()?, &record.shape)?;
                reader.read(record, &ShardSpec::unsharded(&record.shape), &mut tensor)?;
                Ok((name.clone(), tensor))
            })
            .collect()
    }
}
