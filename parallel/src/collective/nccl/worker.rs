//! The thread of a rank: gives the calls of all its groups to one stream, and looks after those that are under way.

use ferrotron_cuda::nccl::Communicator;
use ferrotron_cuda::stream::{Event, Stream};
use ferrotron_tensor::{Device, Error, Result, StreamGuard};
use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
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

/// A group of a rank, as the thread knows it.
pub struct Member {
    pub host: Arc<dyn Collective>,
    /// Number of the communicator that carries its calls out.
    pub communicator: usize,
    /// The rank of each of its ranks in that communicator.
    pub ranks: Vec<usize>,
    pub traffic: Mutex<CommVolume>,
    /// Number of calls so far.
    pub calls: AtomicU64,
}

/// A call on its way to the stream.
pub struct NcclCall {
    pub member: Arc<Member>,
    pub call: Call,
    /// Its number in the group.
    pub number: u64,
    pub memory: Memory,
    /// The event of the compute stream that must have passed before.
    pub given: Event,
    /// Whether the call is captured: only its replays run, and nobody can ask for its end.
    pub is_captured: bool,
    pub completion: Sender<Result<StreamGuard<Memory>>>,
}

/// What the thread is told, in this order.
pub enum Job {
    /// The next communicator, with a group of its ranks.
    Communicator(Communicator, Arc<dyn Collective>),
    /// Calls that are launched together.
    Calls(Vec<NcclCall>),
    /// A replay of captured calls, which counts as the group's call `number`, and its end in the compute stream.
    Replay { member: Arc<Member>, number: u64, end: Event },
}

/// A call in the stream, or a replay.
struct UnderWay {
    member: Arc<Member>,
    /// None for a replay.
    call: Option<Call>,
    number: u64,
    end: Arc<Event>,
    until: Instant,
}

pub struct Worker {
    /// All communicators, each with a group of its ranks; none once a call has failed.
    communicators: Vec<(Communicator, Arc<dyn Collective>)>,
    stream: Stream,
    device: Device,
    timeout: Duration,
    under_way: VecDeque<UnderWay>,
    failure: Option<String>,
}

impl Worker {
    pub fn new(stream: Stream, device: &Device, timeout: Duration) -> Worker {
        Worker {
            communicators: Vec::new(),
            stream,
            device: device.clone(),
            timeout,
            under_way: VecDeque::new(),
            failure: None,
        }
    }

    /// Carries out calls until all handles of groups are dropped and all calls have ended.
    pub fn serve(mut self, jobs: &Receiver<Job>) {
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
                Ok(Job::Communicator(communicator, host)) => {
                    self.communicators.push((communicator, host));
                }
                Ok(Job::Calls(calls)) => self.carry_out(calls),
                Ok(Job::Replay { member, number, end }) => {
                    let (call, until) = (None, Instant::now() + self.timeout);
                    let end = Arc::new(end);
                    self.under_way.push_back(UnderWay { member, call, number, end, until });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => open = false,
            }
            if let Err((error, host)) = self.look() {
                self.give_up(&*host, &error);
            }
        }
        self.leave();
    }

    fn carry_out(&mut self, mut calls: Vec<NcclCall>) {
        let begun = self.begin(&mut calls);
        if let Err(error) = &begun {
            self.give_up(&*calls[0].member.host, error);
        }
        // Also where a call has failed: some of it may be in the stream.
        let end = self.stream.record().map(Arc::new).map_err(Error::from_gpu);
        for NcclCall { member, call, number, memory, is_captured, completion, .. } in calls {
            let result = end.clone().and_then(|end| {
                let lent = StreamGuard::new(&self.device, end.clone(), memory);
                begun.clone().map(|()| {
                    let (call, until) = (Some(call), Instant::now() + self.timeout);
                    if !is_captured {
                        self.under_way.push_back(UnderWay { member, call, number, end, until });
                    }
                    lent
                })
            });
            let _ = completion.send(result); // the caller may have dropped its `Work`
        }
    }

    /// Gives calls of one communicator to the stream, several as one.
    fn begin(&mut self, calls: &mut [NcclCall]) -> Result<()> {
        if let Some(failure) = &self.failure {
            return Err(Error::communication("", failure.as_str()));
        }
        let first = &calls[0];
        let (place, number) =
            (first.member.place(Some(&first.call), first.number), first.member.communicator);
        if calls.iter().any(|call| call.member.communicator != number) {
            return Err(Error::config(
                "nccl",
                format!("{place} is of another communicator than those with it"),
            ));
        }
        let Some((communicator, host)) = self.communicators.get_mut(number) else {
            return Err(Error::communication("nccl", "the group has ended"));
        };
        for call in calls.iter() {
            self.stream.wait(&call.given).map_err(Error::from_gpu)?;
        }
        // SAFETY: no other code uses the calls' memory until `StreamGuard` has made the compute stream wait for their
        // end, and the stream has waited for what the compute stream was given before.
        let give = |communicator: &mut Communicator, one: &mut NcclCall| unsafe {
            give(
                communicator,
                &self.stream,
                (one.member.host.rank(), &one.member.ranks),
                &one.call,
                &mut one.memory,
            )
        };
        match &mut *calls {
            [one] => give(communicator, one)?,
            all => {
                let mut given = Ok(());
                let grouped = communicator.group(|communicator| {
                    given = all.iter_mut().try_for_each(|one| give(communicator, one));
                    Ok(())
                });
                given.and(grouped.map_err(Error::from_gpu))?;
            }
        }
        until_ready(communicator, &**host, self.timeout, &|| format!("{place} did not begin"))?;
        for NcclCall { member, call, .. } in calls {
            let bytes = call.bytes_sent(member.host.rank(), member.ranks.len());
            member.traffic.lock().unwrap_or_else(PoisonError::into_inner).count(call.op, bytes);
        }
        Ok(())
    }

    /// Looks after calls that are under way. Errors with a group whose call has failed.
    fn look(&mut self) -> std::result::Result<(), (Error, Arc<dyn Collective>)> {
        while let Some(first) = self.under_way.front() {
            let member = first.member.clone();
            let of_group = |error| (error, member.host.clone());
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
                    return Err(of_group(Error::from_gpu(error)));
                }
            }
            if self.failure.is_some() {
                return Ok(()); // it was given up and is about to end
            }
            let place = || member.place(first.call.as_ref(), first.number);
            member.host.check().map_err(|error| {
                of_group(Error::communication("", format!("{error}; {} was under way", place())))
            })?;
            if Instant::now() > first.until {
                let message = format!(
                    "{} did not end within {:?}: a rank is late, or has called groups in another order",
                    place(),
                    self.timeout
                );
                return Err(of_group(Error::communication("nccl", message)));
            }
            if let Some((communicator, _)) = self.communicators.get_mut(member.communicator) {
                communicator.is_ready().map_err(|error| of_group(Error::from_gpu(error)))?;
            }
            return Ok(());
        }
        Ok(())
    }

    /// Ends the calls of all ranks: this one's are aborted, so that nothing waits for them for ever.
    fn give_up(&mut self, host: &dyn Collective, error: &Error) {
        if self.failure.is_none() {
            let reason = error.to_string();
            host.fail(&reason);
            self.failure = Some(reason);
        }
        abort(self.communicators.drain(..).map(|(communicator, _)| communicator));
    }

    /// Takes leave of the others, so that no rank frees memory that another reads.
    fn leave(mut self) {
        let all = &mut self.communicators;
        let begun = all.iter_mut().try_for_each(|(communicator, _)| communicator.begin_leave());
        let left = begun.map_err(Error::from_gpu).and_then(|()| {
            all.iter_mut().try_for_each(|(communicator, host)| {
                until_ready(communicator, &**host, LEAVE, &|| "the others stay".to_string())
            })
        });
        let all = self.communicators.drain(..).map(|(communicator, _)| communicator);
        match left {
            Ok(()) => all.for_each(Communicator::destroy),
            Err(_) => abort(all),
        }
    }
}

impl Member {
    /// Names a call, or a replay of captured calls, and its rank.
    fn place(&self, call: Option<&Call>, number: u64) -> String {
        let what = call.map_or("a replay of captured calls".to_string(), Call::to_string);
        format!("call {number} of rank {} of group {} ({what})", self.host.rank(), self.host.name())
    }
}

/// Ends the calls of communicators. That is done at once, but freeing one may take until the other ranks of the machine
/// have come as far, and they may be waiting for this one. So each has a thread, and nobody waits long for them.
pub fn abort(communicators: impl IntoIterator<Item = Communicator>) {
    let (told, freed) = channel::<()>();
    for communicator in communicators {
        let told = told.clone();
        let free = move || drop((communicator, told));
        let _ = std::thread::Builder::new().name("nccl abort".into()).spawn(free);
    }
    drop(told);
    let _ = freed.recv_timeout(ABORT); // until nobody can tell any more: all are freed
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
