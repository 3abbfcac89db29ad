//! The order of launches: the calls of all groups of a rank, one after another, as the rank makes them.

use ferrotron_cuda::gpu::Gpu;
use ferrotron_cuda::nccl::Communicator;
use ferrotron_cuda::stream::Stream;
use ferrotron_tensor::{Device, Error, Result, StreamGuard};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::super::{Call, Collective, Memory};
use super::worker::{Job, Member, NcclCall, Worker};

/// The one thread and the one stream of a rank's calls. It ends with the last handle, when all calls have ended.
pub struct Launcher {
    device: Device,
    queue: Mutex<Queue>,
    thread: Option<JoinHandle<()>>,
}

struct Queue {
    /// Closed before the thread is joined.
    jobs: Option<Sender<Job>>,
    /// The calls that are to be launched together, while they are collected.
    held: Option<Vec<NcclCall>>,
}

impl Launcher {
    /// Starts the thread. Errors if `device` is not a GPU.
    pub fn new(device: &Device, timeout: Duration) -> Result<Launcher> {
        let stream = Stream::new(gpu(device)?.context()).map_err(Error::from_gpu)?;
        let worker = Worker::new(stream, device, timeout);
        let (jobs, queue) = channel();
        let thread = std::thread::Builder::new()
            .name("nccl".into())
            .spawn(move || worker.serve(&queue))
            .map_err(|error| Error::communication("nccl", format!("no thread: {error}")))?;
        let queue = Mutex::new(Queue { jobs: Some(jobs), held: None });
        Ok(Launcher { device: device.clone(), queue, thread: Some(thread) })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Adds a communicator, whose number is that of those before.
    pub fn add(&self, communicator: Communicator, host: &Arc<dyn Collective>) -> Result<()> {
        self.queue().send(Job::Communicator(communicator, host.clone()))
    }

    /// Appends a call to those of all groups of this rank.
    pub fn launch(
        &self,
        member: &Arc<Member>,
        call: Call,
        memory: Memory,
    ) -> Result<Receiver<Result<StreamGuard<Memory>>>> {
        // What the compute stream was given until now comes before the call.
        let given = gpu(&self.device)?.compute().record().map_err(Error::from_gpu)?;
        let is_captured = self.device.is_capturing();
        let (completion, done) = channel();
        let mut queue = self.queue();
        let (member, number) = (member.clone(), member.calls.fetch_add(1, Relaxed) + 1);
        let call = NcclCall { member, call, number, memory, given, is_captured, completion };
        match &mut queue.held {
            Some(held) => held.push(call),
            None => queue.send(Job::Calls(vec![call]))?,
        }
        if !is_captured || queue.held.is_some() {
            return Ok(done);
        }
        // The capture must not end before the thread has come to the call.
        drop(queue);
        let launched = done.recv().map_err(|_| ended())?;
        let (completion, done) = channel();
        let _ = completion.send(launched);
        Ok(done)
    }

    /// Looks after the replay that the GPU was given last, as after a call of `member`.
    pub fn watch_replay(&self, member: &Arc<Member>) -> Result<()> {
        let end = gpu(&self.device)?.compute().record().map_err(Error::from_gpu)?;
        let queue = self.queue();
        let (member, number) = (member.clone(), member.calls.fetch_add(1, Relaxed) + 1);
        queue.send(Job::Replay { member, number, end })
    }

    /// Launches the calls that `f` makes as one, which must be of one communicator; `f` waits for none of them.
    pub fn together(&self, f: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.queue().held = Some(Vec::new());
        let made = f();
        let mut queue = self.queue();
        let held = queue.held.take().unwrap_or_default();
        made?;
        if held.is_empty() { Ok(()) } else { queue.send(Job::Calls(held)) }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The GPU of a device.
pub fn gpu(device: &Device) -> Result<&Gpu> {
    device.gpu().ok_or_else(|| {
        Error::config("nccl", format!("moves tensors of GPUs, this rank's are on {device:?}"))
    })
}

impl Queue {
    fn send(&self, job: Job) -> Result<()> {
        let sent = self.jobs.as_ref().and_then(|jobs| jobs.send(job).ok());
        sent.ok_or_else(ended)
    }
}

/// The error of a call that nobody carries out.
pub fn ended() -> Error {
    Error::communication("nccl", "the rank's thread has ended")
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.queue().jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // the waiting caller gets a panic as an error
        }
    }
}
