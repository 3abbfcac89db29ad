//! A group of ranks: one method for each collective operation.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::blocking::Blocking;
use super::fake::Fake;
use super::{Buffer, Call, Collective, CommVolume, Memory, Op, Reduction, Work, partition_range};

/// The ranks that carry out collectives together. Cloning gives another handle of the same group.
///
/// A group of one does nothing, at no cost, so the code of one rank and of many is the same:
///
/// ```
/// use ferrotron_parallel::collective::{Group, Reduction};
/// use ferrotron_tensor::{Device, Tensor};
/// let group = Group::single();
/// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 2.0], &[2])?;
/// let sum = group.all_reduce(x, Reduction::Sum)?.wait()?;
/// assert_eq!(sum.to_vec::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct Group(Option<Arc<dyn Collective>>);

impl Group {
    /// A group of this rank alone.
    pub fn single() -> Group {
        Group(None)
    }

    /// The group whose calls `collective` carries out.
    pub fn new(collective: Arc<dyn Collective>) -> Group {
        if collective.size() == 1 { Group(None) } else { Group(Some(collective)) }
    }

    /// A group with no other rank than this one: every call is done at once and leaves its memory as it is.
    pub fn fake(name: &str, rank: usize, size: usize) -> Group {
        Group::new(Arc::new(Fake::new(name, rank, size)))
    }

    /// The same group by another name, with its own counts of [`Group::traffic`]. Calls by either name wait for one another,
    /// in the order in which they are made, which must be the same on every rank.
    #[must_use]
    pub fn named(&self, name: &str) -> Group {
        let named = |collective: &Arc<dyn Collective>| collective.named(name);
        Group(self.0.as_ref().map(|own| named(own).unwrap_or_else(|| own.clone())))
    }

    /// A handle of the same group whose methods return when their call has ended. Where ranks share memory, the calling
    /// thread carries it out, which is faster than a progress thread if there is nothing to compute meanwhile.
    ///
    /// ```
    /// use ferrotron_parallel::collective::{Reduction, WorldConfig, run_threads};
    /// use ferrotron_tensor::{Device, Tensor};
    /// let sums = run_threads(2, &WorldConfig::default(), |world| {
    ///     let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32], &[1])?;
    ///     world.everyone()?.blocking().all_reduce(x, Reduction::Sum)?.wait()?.item()
    /// });
    /// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 2.0)));
    /// ```
    #[must_use]
    pub fn blocking(&self) -> Group {
        Group(
            self.0.clone().map(|collective| Arc::new(Blocking(collective)) as Arc<dyn Collective>),
        )
    }

    /// The same group with another backend: `wrap` gets the present one and returns the new one.
    #[must_use]
    pub fn map_collectives(
        &self,
        wrap: &dyn Fn(Arc<dyn Collective>) -> Arc<dyn Collective>,
    ) -> Group {
        Group(self.0.clone().map(wrap))
    }

    /// The backend that carries out the calls; none in a group of one.
    pub fn collective(&self) -> Option<&Arc<dyn Collective>> {
        self.0.as_ref()
    }

    /// Calls `f`, whose sends and receives, by groups of the same pipeline, wait for none of one another: other calls of
    /// NCCL do, in the order in which they are made. `f` does not wait for them.
    pub fn together(&self, mut f: impl FnMut() -> Result<()>) -> Result<()> {
        match &self.0 {
            Some(collective) => collective.together(&mut f),
            None => f(),
        }
    }

    /// This rank's number within the group.
    pub fn rank(&self) -> usize {
        self.0.as_ref().map_or(0, |collective| collective.rank())
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.0.as_ref().map_or(1, |collective| collective.size())
    }

    /// Errors if another rank is known to have failed or left: what its calls have left in memory has no meaning.
    pub fn check(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |collective| collective.check())
    }

    /// Whether calls on tensors of a GPU are captured with the rest of the work: see
    /// [`CudaGraph`](ferrotron_tensor::CudaGraph). NCCL's are.
    pub fn is_capturable(&self) -> bool {
        self.0.as_ref().is_none_or(|collective| collective.is_capturable())
    }

    /// Looks after a replay of captured work that the GPU was given last: if it does not end within the timeout, or another rank
    /// is gone, calls of all ranks end with an error. A replay counts as one call. All ranks of the group replay the same work.
    ///
    /// Errors if a call has failed before.
    pub fn watch_replay(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |collective| collective.watch_replay())
    }

    /// The traffic that this rank has sent so far: none in a group of one. Calls that are replayed count where they are captured.
    pub fn traffic(&self) -> CommVolume {
        self.0.as_ref().map_or_else(CommVolume::default, |collective| collective.traffic())
    }

    /// This rank's part of `len` elements.
    pub fn local_range(&self, len: usize) -> std::ops::Range<usize> {
        partition_range(len, self.size(), self.rank())
    }

    /// The reduction of every rank's `tensor`, on every rank; in place unless another handle shares its memory.
    #[track_caller]
    pub fn all_reduce(&self, tensor: Tensor, reduction: Reduction) -> Result<Work<Tensor>> {
        self.in_place(Op::AllReduce(reduction), tensor)
    }

    /// The reduction of every rank's `tensor`, on rank `root`; the others get their own back.
    #[track_caller]
    pub fn reduce(
        &self,
        tensor: Tensor,
        root: usize,
        reduction: Reduction,
    ) -> Result<Work<Tensor>> {
        self.in_place(Op::Reduce { root, reduction }, tensor)
    }

    /// The root's `tensor`, on every rank; the others' only says dims and dtype.
    #[track_caller]
    pub fn broadcast(&self, tensor: Tensor, root: usize) -> Result<Work<Tensor>> {
        self.in_place(Op::Broadcast { root }, tensor)
    }

    /// The rows (dim 0) of all ranks, in rank order, on every rank. `local_range` holds this rank's
    /// [`local_range`](Group::local_range) of `rows` rows.
    #[track_caller]
    pub fn all_gather(&self, part: Tensor, rows: usize) -> Result<Work<Tensor>> {
        let Some(collective) = &self.0 else { return Ok(Work::ready(part)) };
        let own = self.check_part("all_gather", &part, rows)?;
        let mut whole = with_rows(&part, rows)?;
        whole.narrow_mut(0, own.start, own.len(), |place| place.copy_from(&part))?;
        let call = call(Op::AllGather, &whole);
        Ok(collective.start(call, Memory::in_place(Buffer::Tensor(whole))).map(output))
    }

    /// This rank's [`local_range`](Group::local_range) of the rows (dim 0) of the reduction of every rank's `tensor`.
    #[track_caller]
    pub fn reduce_scatter(&self, tensor: Tensor, reduction: Reduction) -> Result<Work<Tensor>> {
        let Some(collective) = &self.0 else { return Ok(Work::ready(tensor)) };
        let call = call(Op::ReduceScatter(reduction), &tensor);
        let own = self.local_range(rows(&tensor)?);
        let work = collective.start(call, Memory::in_place(Buffer::from_tensor(tensor)?));
        // A copy, so that the rest of the buffer is free.
        Ok(work.map(move |memory| output(memory)?.narrow(0, own.start, own.len())?.copy()))
    }

    /// The rows (dim 0) of all ranks, in rank order, on rank `root`; nothing on the others.
    #[track_caller]
    pub fn gather(&self, part: Tensor, rows: usize, root: usize) -> Result<Work<Option<Tensor>>> {
        let Some(collective) = &self.0 else { return Ok(Work::ready(Some(part))) };
        self.check_part("gather", &part, rows)?;
        let len = part.dims()[1..].iter().product::<usize>() * rows;
        let output = (self.rank() == root).then(|| with_rows(&part, rows)).transpose()?;
        let call = Call { len, ..call(Op::Gather { root }, &part) };
        let memory =
            Memory { input: Some(Buffer::from_tensor(part)?), output: output.map(Buffer::Tensor) };
        Ok(collective
            .start(call, memory)
            .map(|memory| Ok(memory.output.and_then(Buffer::into_tensor))))
    }

    /// This rank's [`local_range`](Group::local_range) of the root's rows (dim 0). The root gives `whole`; all give a
    /// tensor of the dims of their part, which is overwritten.
    #[track_caller]
    pub fn scatter(
        &self,
        whole: Option<Tensor>,
        part: Tensor,
        rows: usize,
        root: usize,
    ) -> Result<Work<Tensor>> {
        let Some(collective) = &self.0 else { return Ok(Work::ready(whole.unwrap_or(part))) };
        self.check_part("scatter", &part, rows)?;
        let row: usize = part.dims()[1..].iter().product();
        let whole = whole.filter(|_| self.rank() == root);
        if let Some(whole) = &whole
            && whole.numel() != row * rows
        {
            let message =
                format!("{rows} rows of {row} elements are to be cut, got {:?}", whole.dims());
            return Err(Error::shape("scatter", message));
        }
        if let Some(whole) = &whole
            && whole.dtype() != part.dtype()
        {
            let message = format!("parts of {} cannot be {}", whole.dtype(), part.dtype());
            return Err(Error::dtype("scatter", message));
        }
        let call = Call { len: row * rows, ..call(Op::Scatter { root }, &part) };
        let input = whole.map(Buffer::from_tensor).transpose()?;
        Ok(collective
            .start(call, Memory { input, output: Some(Buffer::from_tensor(part)?) })
            .map(output))
    }

    /// This rank's [`local_range`](Group::local_range) of the rows (dim 0) of every rank's `tensor`, in rank order.
    #[track_caller]
    pub fn all_to_all(&self, tensor: Tensor) -> Result<Work<Tensor>> {
        let Some(collective) = &self.0 else { return Ok(Work::ready(tensor)) };
        let call = call(Op::AllToAll, &tensor);
        let received = with_rows(&tensor, self.local_range(rows(&tensor)?).len() * self.size())?;
        let memory = Memory {
            input: Some(Buffer::from_tensor(tensor)?),
            output: Some(Buffer::Tensor(received)),
        };
        Ok(collective.start(call, memory).map(output))
    }

    /// Sends `tensor` to rank `to`, which calls [`Group::recv`]. The call may last until it is received: two ranks that send to
    /// each other call [`Group::send_recv`].
    #[track_caller]
    pub fn send(&self, tensor: Tensor, to: usize) -> Result<Work<()>> {
        let collective = self.peers("send")?;
        let call = call(Op::Send { to }, &tensor);
        let memory = Memory { input: Some(Buffer::from_tensor(tensor)?), output: None };
        Ok(collective.start(call, memory).map(|_| Ok(())))
    }

    /// Receives what rank `from` sends; `tensor` gives dims and dtype and is overwritten.
    #[track_caller]
    pub fn recv(&self, tensor: Tensor, from: usize) -> Result<Work<Tensor>> {
        let collective = self.peers("recv")?;
        let call = call(Op::Recv { from }, &tensor);
        Ok(collective.start(call, Memory::in_place(Buffer::from_tensor(tensor)?)).map(output))
    }

    /// Sends `tensor` to rank `to` while a tensor of the same dims comes from rank `from`.
    #[track_caller]
    pub fn send_recv(&self, tensor: Tensor, to: usize, from: usize) -> Result<Work<Tensor>> {
        let Some(collective) = &self.0 else { return Ok(Work::ready(tensor)) };
        let call = call(Op::SendRecv { to, from }, &tensor);
        let received = Tensor::empty(tensor.device(), tensor.dtype(), tensor.dims())?;
        let memory = Memory {
            input: Some(Buffer::from_tensor(tensor)?),
            output: Some(Buffer::Tensor(received)),
        };
        Ok(collective.start(call, memory).map(output))
    }

    /// Waits until every rank has come here.
    #[track_caller]
    pub fn barrier(&self) -> Work<()> {
        let Some(collective) = &self.0 else { return Work::ready(()) };
        let site = Location::caller();
        let call = Call { op: Op::Barrier, dtype: DType::U8, len: 0, unit: 1, site };
        collective.start(call, Memory::default()).map(|_| Ok(()))
    }

    /// The sum of one number of every rank, on every rank.
    #[track_caller]
    pub fn sum(&self, device: &Device, value: f64) -> Result<f64> {
        Ok(self.sums(device, &[value])?[0])
    }

    /// The sums of numbers of every rank, on every rank, in one call.
    #[track_caller]
    pub fn sums(&self, device: &Device, values: &[f64]) -> Result<Vec<f64>> {
        if self.size() == 1 || values.is_empty() {
            return Ok(values.to_vec()); // without a detour over the device, which would have to be waited for
        }
        let values = Tensor::from_slice(device, values, &[values.len()])?;
        self.blocking().all_reduce(values, Reduction::Sum)?.wait()?.to_vec::<f64>()
    }

    /// Reduces all elements of a flat like [`Group::all_reduce`]. Returns at once unless the flat is locked, as by an
    /// earlier call that still works on it.
    #[track_caller]
    pub fn all_reduce_flat(&self, flat: &SharedFlatBuffer, reduction: Reduction) -> Work<()> {
        self.in_place_flat(Op::AllReduce(reduction), flat)
    }

    /// Reduces a flat so that this rank's [`local_range`](Group::local_range) of its elements is right; the others stay
    /// as they were. Returns as [`Group::all_reduce_flat`] does.
    #[track_caller]
    pub fn reduce_scatter_flat(&self, flat: &SharedFlatBuffer, reduction: Reduction) -> Work<()> {
        self.in_place_flat(Op::ReduceScatter(reduction), flat)
    }

    /// Fills a flat from every rank's [`local_range`](Group::local_range) of it. Returns as [`Group::all_reduce_flat`]
    /// does.
    #[track_caller]
    pub fn all_gather_flat(&self, flat: &SharedFlatBuffer) -> Work<()> {
        self.in_place_flat(Op::AllGather, flat)
    }

    #[track_caller]
    fn in_place(&self, op: Op, tensor: Tensor) -> Result<Work<Tensor>> {
        let Some(collective) = &self.0 else { return Ok(Work::ready(tensor)) };
        let call = call(op, &tensor);
        Ok(collective.start(call, Memory::in_place(Buffer::from_tensor(tensor)?)).map(output))
    }

    #[track_caller]
    fn in_place_flat(&self, op: Op, flat: &SharedFlatBuffer) -> Work<()> {
        let Some(collective) = &self.0 else { return Work::ready(()) };
        let (dtype, len) = match flat.lock() {
            Ok(flat) => (flat.dtype(), flat.numel()),
            Err(error) => return Work::ended(Err(error)),
        };
        let call = Call { op, dtype, len, unit: 1, site: Location::caller() };
        collective
            .start(call, Memory::in_place(Buffer::Flat(flat.to_fill().clone())))
            .map(|_| Ok(()))
    }

    fn peers(&self, op: &'static str) -> Result<&Arc<dyn Collective>> {
        self.0.as_ref().ok_or_else(|| Error::config(op, "a group of one has nobody else"))
    }

    fn check_part(
        &self,
        op: &'static str,
        part: &Tensor,
        rows: usize,
    ) -> Result<std::ops::Range<usize>> {
        let own = self.local_range(rows);
        if part.dims().first() == Some(&own.len()) {
            return Ok(own);
        }
        let (rank, size, held) = (self.rank(), self.size(), own.len());
        let message =
            format!("rank {rank} of {size} holds {held} of {rows} rows, got {:?}", part.dims());
        Err(Error::shape(op, message))
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.as_ref().map_or("single", |collective| collective.name());
        write!(f, "Group({name}: rank {} of {})", self.rank(), self.size())
    }
}

/// The call of `op` on a whole tensor, cut by rows.
#[track_caller]
fn call(op: Op, tensor: &Tensor) -> Call {
    let row = tensor.dims().get(1..).map_or(1, |dims| dims.iter().product::<usize>());
    Call {
        op,
        dtype: tensor.dtype(),
        len: tensor.numel(),
        unit: row.max(1),
        site: Location::caller(),
    }
}

fn rows(tensor: &Tensor) -> Result<usize> {
    tensor.dim(0)
}

/// An unwritten tensor like `local_range`, but of `rows` rows.
fn with_rows(part: &Tensor, rows: usize) -> Result<Tensor> {
    let mut dims = part.dims().to_vec();
    dims[0] = rows;
    Tensor::empty(part.device(), part.dtype(), &dims)
}

fn output(memory: Memory) -> Result<Tensor> {
    memory
        .output
        .and_then(Buffer::into_tensor)
        .ok_or_else(|| Error::graph("collective", "the call returned no tensor"))
}
