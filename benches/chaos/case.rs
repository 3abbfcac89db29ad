//! The cases: which fault comes when, in which layout. All of a case follows from its number.

use ferrotron::tensor::RandomKey;

/// A fault that meets a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// SIGKILL of a rank.
    KillRank,
    /// SIGKILL of the launcher.
    KillLauncher,
    /// SIGKILL of the launcher and all ranks.
    KillAll,
    /// SIGSTOP of a rank, and SIGCONT.
    Pause,
    /// SIGSTOP of a rank, and SIGTERM of the launcher.
    StopAndTerminate,
    /// SIGTERM of the launcher.
    Terminate,
    /// Writes of checkpoints fail with ENOSPC.
    FullDisk,
    /// A connection between two ranks is cut.
    CutLink,
    /// A link holds everything back for a while, and all become slower.
    DelayLinks,
}

impl Kind {
    pub const ALL: [Kind; 9] = [
        Kind::KillRank,
        Kind::KillLauncher,
        Kind::KillAll,
        Kind::Pause,
        Kind::StopAndTerminate,
        Kind::Terminate,
        Kind::FullDisk,
        Kind::CutLink,
        Kind::DelayLinks,
    ];

    /// Its name in the results.
    pub fn name(self) -> &'static str {
        match self {
            Kind::KillRank => "SIGKILL of a rank",
            Kind::KillLauncher => "SIGKILL of the launcher",
            Kind::KillAll => "SIGKILL of all",
            Kind::Pause => "SIGSTOP and SIGCONT of a rank",
            Kind::StopAndTerminate => "SIGSTOP of a rank, SIGTERM of the job",
            Kind::Terminate => "SIGTERM of the job",
            Kind::FullDisk => "full disk",
            Kind::CutLink => "cut link",
            Kind::DelayLinks => "delayed links",
        }
    }

    /// Whether it happens to links, which then go through a proxy.
    pub fn is_of_links(self) -> bool {
        matches!(self, Kind::CutLink | Kind::DelayLinks)
    }

    /// Whether the job must train on to its end nevertheless.
    pub fn is_survived(self) -> bool {
        matches!(self, Kind::Pause | Kind::DelayLinks)
    }
}

/// A way in which ranks share the work.
#[derive(Debug)]
pub struct Layout {
    pub name: &'static str,
    pub ranks: usize,
    pub options: &'static str,
}

/// The first is the only one without links.
pub const LAYOUTS: [Layout; 7] = [
    Layout { name: "1 rank", ranks: 1, options: "" },
    Layout { name: "dp 2, ZeRO 1", ranks: 2, options: "--zero-stage 1" },
    Layout {
        name: "pp 2, asynchronous saves",
        ranks: 2,
        options: "--pipeline-model-parallel-size 2 --async-save",
    },
    Layout {
        name: "tp 2 with sequences",
        ranks: 2,
        options: "--tensor-model-parallel-size 2 --sequence-parallel",
    },
    Layout { name: "cp 2", ranks: 2, options: "--context-parallel-size 2" },
    Layout {
        name: "tp 2 x pp 2",
        ranks: 4,
        options: "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    },
    Layout { name: "dp 4, ZeRO 3", ranks: 4, options: "--zero-stage 3" },
];

/// One case.
#[derive(Debug)]
pub struct Case {
    pub number: u64,
    pub kind: Kind,
    pub layout: &'static Layout,
    /// The number of starts of the job that are disturbed: one or two.
    pub disturbed: usize,
    key: RandomKey,
}

impl Case {
    /// The case of a number: all kinds in turn, each in all layouts in turn.
    pub fn new(number: u64) -> Case {
        let kinds = Kind::ALL.len() as u64;
        let kind = Kind::ALL[(number % kinds) as usize];
        let layouts = if kind.is_of_links() { &LAYOUTS[1..] } else { &LAYOUTS[..] };
        let layout = &layouts[(number / kinds) as usize % layouts.len()];
        let key = RandomKey::new(number, 0, "chaos");
        let disturbed = 1 + (key.uniform(0) * 2.0) as usize;
        Case { number, kind, layout, disturbed, key }
    }

    /// The random numbers from 0 to 1 of one fault: its moment, its victim, and how long or how much.
    pub fn draw(&self, fault: usize) -> [f64; 3] {
        [1, 2, 3].map(|what| self.key.uniform(4 * fault as u64 + what))
    }
}
