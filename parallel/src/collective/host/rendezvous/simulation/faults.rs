//! All that goes wrong in a simulated job.

use std::collections::BTreeSet;
use std::time::Duration;

use super::dice::Dice;

/// How long packets take.
#[derive(Debug, Clone, Copy)]
pub struct Weather {
    /// Least and longest time of a packet.
    pub latency: [Duration; 2],
    /// Share of packets that are lost, and sent again.
    pub lost: f64,
    /// Longest time until a lost packet has come.
    pub resent: Duration,
    /// Share of connections that are lost while they are made.
    pub hung_up: f64,
}

/// The moment of a fault.
#[derive(Debug, Clone)]
pub enum When {
    /// A time after the start.
    After(Duration),
    /// A process writes its n-th packet.
    Packet(usize, u64),
}

/// The part of a rank's work in which it does something wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Before the first step.
    Start,
    /// Between the steps.
    Steps,
    /// Before its share of the checkpoint is written.
    Save,
    /// Before it takes leave.
    End,
}

/// Something that goes wrong.
#[derive(Debug, Clone)]
pub enum Fault {
    /// A rank is killed.
    Kill(usize),
    /// The machine of a rank is off.
    Off(usize),
    /// A rank is stopped, for a time or for ever.
    Stop(usize, Option<Duration>),
    /// All ranks are stopped for a time.
    StopAll(Duration),
    /// Some ranks do not reach the others, for a time or for ever.
    Cut(BTreeSet<usize>, Option<Duration>),
    /// A connection of a rank breaks.
    Reset(usize),
    /// A rank is never started.
    Absent(usize),
    /// A rank is started twice.
    Twice(usize),
    /// A rank's program ends with an error.
    Fails(usize, Phase),
    /// A rank's program does not go on.
    Hangs(usize, Phase),
    /// A rank calls something else than the others.
    Disagrees(usize),
    /// The share of a rank cannot be written.
    DiskFull(usize),
    /// A process that does not belong to the job connects to a rank.
    Stranger(usize, Stranger),
}

/// A process that does not belong to the job.
#[derive(Debug, Clone, Copy)]
pub enum Stranger {
    /// It opens many connections and says nothing.
    Silent,
    /// It sends bytes at random.
    Noise,
    /// It is of another version of the program.
    Version,
    /// It knows another secret.
    Secret,
    /// It is a rank of another job.
    OtherJob,
    /// It is a rank of an earlier start of the same job.
    Earlier,
}

/// A job, and all that goes wrong in it.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its number.
    pub seed: u64,
    /// Number of ranks.
    pub size: usize,
    /// Consecutive ranks in the first kind of groups.
    pub row: usize,
    /// Ranks of each machine.
    pub per_machine: usize,
    /// Timeout of calls and of the meeting.
    pub timeout: Duration,
    /// Longest time between the starts of ranks.
    pub starts: Duration,
    /// Longest time that a rank computes.
    pub work: Duration,
    /// Longest time that a process waits for the processor, each time.
    pub busy: Duration,
    /// How long packets take.
    pub weather: Weather,
    /// Whether connections are sealed.
    pub is_sealed: bool,
    /// What goes wrong.
    pub faults: Vec<(When, Fault)>,
}

impl Fault {
    /// Returns whether the job must end well all the same, if all comes back within `patience`.
    pub fn is_harmless(&self, patience: Duration) -> bool {
        match self {
            Fault::Stop(_, pause) | Fault::Cut(_, pause) => {
                pause.is_some_and(|pause| pause < patience)
            }
            Fault::StopAll(_) | Fault::Twice(_) | Fault::Stranger(..) => true,
            _ => false,
        }
    }

    /// The rank that the others must name if they end, if there is one.
    pub fn culprit(&self) -> Option<usize> {
        match *self {
            Fault::Kill(rank)
            | Fault::Off(rank)
            | Fault::Stop(rank, _)
            | Fault::Absent(rank)
            | Fault::Fails(rank, _)
            | Fault::Hangs(rank, _)
            | Fault::Disagrees(rank) => Some(rank),
            _ => None,
        }
    }
}

impl Scenario {
    /// A job in which nothing goes wrong and packets take a millisecond, on one machine.
    pub fn calm(size: usize, timeout: Duration) -> Scenario {
        let millisecond = Duration::from_millis(1);
        Scenario {
            seed: 0,
            size,
            row: size,
            per_machine: size,
            timeout,
            starts: millisecond,
            work: millisecond,
            busy: Duration::ZERO,
            weather: Weather {
                latency: [millisecond; 2],
                lost: 0.0,
                resent: millisecond,
                hung_up: 0.0,
            },
            is_sealed: false,
            faults: Vec::new(),
        }
    }

    /// The scenario of a seed: one fault, sometimes two or three.
    pub fn of(seed: u64) -> Scenario {
        let dice = &mut Dice::new(seed);
        let size = match dice.below(16) {
            0 => 33 + dice.below(96),
            1 | 2 => 17 + dice.below(16),
            _ => 16,
        };
        let divisors: Vec<_> = (2..size).filter(|row| size % row == 0).collect();
        let row = if divisors.is_empty() { size } else { dice.one_of(&divisors) };
        let milliseconds = Duration::from_millis;
        let per_machine = dice.one_of(&[1, 4, 8, size]);
        let least = dice.between(Duration::from_micros(20), milliseconds(1));
        let is_bad = dice.happens(0.3);
        let weather = Weather {
            latency: [least, least * 10],
            lost: if is_bad { 0.05 * dice.share() } else { 0.0 },
            resent: milliseconds(1000),
            hung_up: if dice.happens(0.1) { 0.2 } else { 0.0 },
        };
        let timeout = Duration::from_secs(dice.one_of(&[20, 60, 600]));
        let starts = dice.between(milliseconds(1), milliseconds(3000));
        let work = dice.between(milliseconds(1), milliseconds(1000));
        let mut scenario = Scenario {
            seed,
            size,
            row,
            per_machine,
            timeout,
            starts,
            work,
            busy: Duration::ZERO,
            weather,
            is_sealed: dice.happens(0.1),
            faults: Vec::new(),
        };
        let faults = dice.one_of(&[1, 1, 1, 1, 1, 2, 2, 3]);
        for _ in 0..faults {
            let fault = scenario.draw(dice);
            scenario.faults.push(fault);
        }
        scenario.delay(&mut Dice::new(!seed));
        scenario
    }

    /// Draws waits for the processor, and pauses about as long as others wait: by dice of their own, so that the scenario
    /// of a seed is otherwise the one that it was before there were these.
    fn delay(&mut self, dice: &mut Dice) {
        if dice.happens(0.1) {
            // A call that is the first of its group takes many of these.
            let most = (self.timeout / 100).min(Duration::from_secs(1));
            self.busy = dice.between(Duration::from_millis(1), most);
        }
        for (_, fault) in &mut self.faults {
            if let Fault::Stop(_, pause) | Fault::Cut(_, pause) = fault
                && dice.happens(0.3)
            {
                *pause = Some(dice.between(self.timeout / 8, self.timeout * 2));
            }
        }
    }

    fn draw(&mut self, dice: &mut Dice) -> (When, Fault) {
        let milliseconds = Duration::from_millis;
        let rank = dice.below(self.size);
        let phase = dice.one_of(&[Phase::Start, Phase::Steps, Phase::Save, Phase::End]);
        // Shorter than the others wait, or for ever.
        let pause = (!dice.happens(0.4)).then(|| dice.between(milliseconds(10), self.timeout / 8));
        let fault = match dice.below(17) {
            0..3 => Fault::Kill(rank),
            3 => Fault::Off(rank),
            4 | 5 => Fault::Stop(rank, pause),
            6 => Fault::StopAll(dice.between(milliseconds(10), self.timeout * 3)),
            7 | 8 => {
                let side = (0..self.size).filter(|_| dice.happens(0.5)).collect();
                Fault::Cut(if dice.happens(0.5) { BTreeSet::from([rank]) } else { side }, pause)
            }
            9 => Fault::Reset(rank),
            10 => Fault::Absent(rank),
            11 => Fault::Twice(rank),
            12 => Fault::Fails(rank, phase),
            13 => Fault::Hangs(rank, phase),
            14 => Fault::Disagrees(rank),
            15 => Fault::DiskFull(rank),
            _ => {
                use Stranger::*;
                let stranger = dice.one_of(&[Silent, Noise, Version, Secret, OtherJob, Earlier]);
                Fault::Stranger(rank, stranger)
            }
        };
        let is_stranger = matches!(fault, Fault::Stranger(..));
        let when = match !is_stranger && dice.happens(0.8) {
            // A rank writes some hundred packets.
            true => When::Packet(rank, 1 + 300_f64.powf(dice.share()) as u64),
            false => When::After(dice.between(milliseconds(1), self.starts + self.work * 10)),
        };
        (when, fault)
    }

    /// Returns whether one of the faults is of a kind.
    pub fn has(&self, is: impl Fn(&Fault) -> bool) -> bool {
        self.faults.iter().any(|(_, fault)| is(fault))
    }
}
