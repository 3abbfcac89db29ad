//! The thread of a group: gives calls to the stream and looks after those that are under way.

use ferrotron_cuda::nccl::Communicator;
use ferrotron_cuda::stream::{Event, Stream};
use ferrotron_tensor::{Device, Error, Result, StreamGuard};
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::super::{Call, Collective, CommVolume, Memory};
use super::calls::give;

/// Interval between two checks of calls that are under way.
const PAUSE: Duration = Duration::from_millis(2);

/// Time that other ranks have to leave before the communicator is aborted.
const LEAVE: Duration = Duration::from_secs(5);

/// Time that an aborted communicator has to free its memory.
const ABORT: Duration = Duration::from_secs(2);

/// A call on its way to the stream.
pub struct NcclCall {
    pub call: Call,
    pub memory: Memory,
    /// The event of the compute stream that must have passed before.
    pub given: Event,
    pub completion: Sender<Result<StreamGuard<Memory>>>,
}

/// A call in the stream.
struct UnderWay {
    call: Call,
    number: u64,
    end: Arc<Event>,
    until: Instant,
}

pub struct Worker {
    host: Arc<dyn Collective>,
    /// The communicator, until it has failed.
    communicator: Option<Communicator>,
    stream: Stream,
    device: Device,
    timeout: Duration,
    traffic: Arc<Mutex<CommVolume>>,
    calls: u64,
    under_way: VecDeque<UnderWay>,
    failure: Option<String>,
}

impl Worker {
    pub fn new(
        host: &Arc<dyn Collective>,
        communicator: Communicator,
        stream: Stream,
        device: &Device,
        timeout: Duration,
        traffic: &Arc<Mutex<CommVolume>>,
    ) -> Worker {
        Worker {
            host: host.clone(),
            communicator: Some(communicator),
            stream,
            device: device.clone(),
            timeout,
            traffic: traffic.clone(),
            calls: 0,
            under_way: VecDeque::new(),
            failure: None,
        }
    }

    /// Carries out calls until all handles of the group are dropped and all calls have ended.
    pub fn serve(mut self, jobs: &Receiver<NcclCall>) {
        let mut open = true;
        while open || !self.under_way.is_empty() {
            let next = match (open, self.under_way.is_empty()) {
                (true, true) => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                (true, false) => jobs.recv_timeout(PAUSE),
                (false, _) => {
                    std::thread::sleep(PAUSE);
                    Err(RecvTimeoutError::Timeout)
                }
            };
            match next {
                Ok(job) => self.carry_out(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => open = false,
            }
            if let Err(error) = self.look() {
                self.give_up(&error);
            }
        }
        self.leave();
    }

    fn carry_out(&mut self, NcclCall { call, mut memory, given, completion }: NcclCall) {
        self.calls += 1;
        let begun = self.begin(&call, &mut memory, &given);
        if let Err(error) = &begun {
            self.give_up(error);
        }
        // Also where the call has failed: some of it may be in the stream.
        let result = self.stream.record().map_err(Error::from_gpu).and_then(|end| {
            let end = Arc::new(end);
            let lent = StreamGuard::new(&self.device, end.clone(), memory);
            begun.map(|()| {
                let until = Instant::now() + self.timeout;
                self.under_way.push_back(UnderWay { call, number: self.calls, end, until });
                lent
            })
        });
        let _ = completion.send(result); // the caller may have dropped its `Work`
    }

    fn begin(&mut self, call: &Call, memory: &mut Memory, given: &Event) -> Result<()> {
        if let Some(failure) = &self.failure {
            return Err(Error::communication("", failure.as_str()));
        }
        let place = place(&*self.host, call, self.calls);
        let Some(communicator) = &mut self.communicator else {
            return Err(Error::communication("nccl", "the group has ended"));
        };
        self.stream.wait(given).map_err(Error::from_gpu)?;
        let (rank, size) = (self.host.rank(), self.host.size());
        // SAFETY: no other code uses the call's memory until `StreamGuard` has made the compute stream wait for its
        // end, and the stream has waited for what the compute stream was given before.
        unsafe { give(communicator, &self.stream, (rank, size), call, memory)? };
        until_ready(communicator, &*self.host, self.timeout, &|| format!("{place} did not begin"))?;
        let bytes = call.bytes_sent(rank, size);
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).count(call.op, bytes);
        Ok(())
    }

    /// Looks after calls that are under way.
    fn look(&mut self) -> Result<()> {
        while let Some(first) = self.under_way.front() {
            match first.end.has_passed() {
                Ok(true) => {
                    self.under_way.pop_front();
                    // The host may be far ahead: a call's time begins when the one before it has ended.
                    if let Some(next) = self.under_way.front_mut() {
                        next.until = Instant::now() + self.timeout;
                    }
                    continue;
                }
                Ok(false) => {}
                Err(error) => {
                    // A GPU that has failed stays so: nothing more is to be heard of any call.
                    self.under_way.clear();
                    return Err(Error::from_gpu(error));
                }
            }
            if self.failure.is_some() {
                return Ok(()); // it was given up and is about to end
            }
            let place = place(&*self.host, &first.call, first.number);
            self.host.check().map_err(|error| {
                Error::communication("", format!("{error}; {place} was under way"))
            })?;
            if Instant::now() > first.until {
                let message = format!("{place} did not end within {:?}", self.timeout);
                return Err(Error::communication("nccl", message));
            }
            if let Some(communicator) = &mut self.communicator {
                communicator.is_ready().map_err(Error::from_gpu)?;
            }
            return Ok(());
        }
        Ok(())
    }

    /// Ends the calls of all ranks: this one's are aborted, so that nothing waits for them for ever.
    fn give_up(&mut self, error: &Error) {
        if self.failure.is_none() {
            let reason = error.to_string();
            self.host.fail(&reason);
            self.failure = Some(reason);
        }
        if let Some(communicator) = self.communicator.take() {
            abort(communicator);
        }
    }

    /// Takes leave of the others, so that no rank frees memory that another reads.
    fn leave(mut self) {
        let Some(mut communicator) = self.communicator.take() else { return };
        let left = communicator.begin_leave().map_err(Error::from_gpu).and_then(|()| {
            until_ready(&mut communicator, &*self.host, LEAVE, &|| "the others stay".to_string())
        });
        match left {
            Ok(()) => communicator.destroy(),
            Err(_) => abort(communicator),
        }
    }
}

/// Ends the calls of a communicator. That is done at once, but freeing it may take until the other ranks of the machine
/// have come as far, and they may be waiting for this one. So no thread here waits long for it.
pub fn abort(communicator: Communicator) {
    let (told, freed) = channel();
    let free = move || {
        drop(communicator);
        let _ = told.send(());
    };
    if std::thread::Builder::new().name("nccl abort".into()).spawn(free).is_ok() {
        let _ = freed.recv_timeout(ABORT);
    }
}

/// Names a call and its rank.
fn place(host: &dyn Collective, call: &Call, number: u64) -> String {
    format!("call {number} of rank {} of group {} ({call})", host.rank(), host.name())
}

/// Waits until what was begun last is in the stream.
///
/// Errors if it takes longer than `limit`, with what `late` says, or a rank is gone.
pub fn until_ready(
    communicator: &mut Communicator,
    host: &dyn Collective,
    limit: Duration,
    late: &dyn Fn() -> String,
) -> Result<()> {
    let started = Instant::now();
    while !communicator.is_ready().map_err(Error::from_gpu)? {
        host.check()?;
        let waited = started.elapsed();
        if waited > limit {
            let message = format!("{} within {limit:?}", late());
            return Err(Error::communication("nccl", message));
        }
        // Most calls are in the stream in microseconds.
        std::thread::sleep((waited / 8).clamp(Duration::from_micros(5), PAUSE));
    }
    Ok(())
}
