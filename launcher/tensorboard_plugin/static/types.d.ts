// The types of the page's modules, for `make lint`; neither served nor packed. First what server and page exchange, as
// README.md in the directory above describes it and launcher/compare/model.py defines it, then the page's own.

// ---- Answers ----

type Interval = [low: number, high: number];
type RunStatus = 'running' | 'done' | 'stopped';
type VariantStatus = 'ok' | 'unsteady' | 'oom' | 'failed' | 'timeout' | 'hung' | 'skipped' | 'planned' | 'running';
type Verdict = 'baseline' | 'faster' | 'slower' | 'same' | 'inconclusive';

interface RunsAnswer {
  version: string;
  logdir: string;
  reload_s: number;
  truncated: boolean;
  runs: RunEntry[];
}

interface RunEntry {
  name: string;
  title: string;
  kind: 'gpurun' | 'traces';
  status: RunStatus;
  mtime_s: number;
  version: string;
}

interface RunAnswer {
  version: string;
  name: string;
  title: string;
  kind: 'gpurun' | 'traces';
  status: RunStatus;
  comparison: Comparison | null;
  host: HostFacts;
  system: string;
  headline: string | null;
  details: string | null;
  alerts: string[];
  facts: string[];
  knee: KneeSentences;
  /** A line of the job file that makes a second variant. */
  compare: string | null;
  bars: BarSentences;
  metrics: Metric[];
  variants: PlannedVariant[];
  improvement: Improvement | null;
}

/** A table with differences: `before` and `after` name the columns around them, the latter with their class. */
interface ForestTable {
  title: string;
  look: string;
  columns: string[];
  before: string[];
  time: string;
  after: [string, string][];
  axis: Axis;
  rows: HTMLElement[];
  note: string;
}

/** What `gpurun improve` has found by this run and the others next to it. */
interface Improvement {
  headline: string;
  /** `Why` and `Next`, with what they say. */
  details: [string, string][];
  remedies: RemedyResult[];
  diff: string;
  notes: string[];
}

interface RemedyResult {
  code: string;
  place: string;
  verdict: 'kept' | 'same' | 'slower' | 'undecided' | 'failed' | 'changes numerics' | 'other random numbers' | 'not tried';
  percent: number | null;
  ci: Interval | null;
  why: string;
}

/** `host.json`; empty for traces that gpurun did not record. */
interface HostFacts {
  hostname?: string;
  cpu_model?: string | null;
  gpus?: HostGpu[];
}

interface HostGpu {
  device: string;
  name: string;
  memory_gib: number;
  power_limit_w: number | null;
  max_sm_clock_mhz: number | null;
}

/** A figure of variants, defined once for all reports (launcher/report/metrics.py). */
interface Metric {
  key: string;
  title: string;
  short: string;
  unit: string;
  better: 'higher' | 'lower';
  drop: number;
}

interface MetricFigure {
  value: number;
  text: string;
  uncertainty: string;
}

interface PlannedVariant {
  id: string;
  label: string;
  strategy: string | null;
  /** Whether its ranks are processes; otherwise one process has all devices. */
  process_per_device: boolean;
  devices: string[];
  split: number[];
  precision: string | null;
  status: VariantStatus;
  reason: string | null;
  explanation: string | null;
  /** By the key of their metric. */
  figures: { [metric: string]: MetricFigure };
  /** That of the difference from the baseline, on which the verdict rests. */
  difference_interval: string;
  curve_tables: CurveTable[];
  cost_sentences: string[];
  /** What the slowest rank's step consists of. */
  step_sentence: string | null;
  /** Where its traced steps aren't the ones that rank it. */
  far_note: string | null;
  /** Why a program that was to be traced has no trace. */
  untraced: string | null;
  /** The rank that the others wait for. */
  slowest_rank: number | null;
  /** By rank, of those without a trace: the phases of the step in ms. */
  timed_parts: { [rank: string]: { [part: string]: number } };
  traces: TraceFile[];
  /** Only of `traces`. */
  problems?: Problem[];
}

interface TraceFile {
  rank: number | null;
  file: string;
  bytes: number;
}

/** `byte`: where in the file, if that is known. */
interface Problem {
  file: string;
  byte: number | null;
  message: string;
}

/** One statement of a report. */
interface Finding {
  code: string;
  level: 'answer' | 'danger' | 'cause' | 'remedy' | 'detail';
  text: string;
  variant: string | null;
}

interface Comparison {
  baseline: string;
  ci_level: number | null;
  noise: Noise;
  variants: VariantResult[];
  fastest: string | null;
  leader: string | null;
  batch_curves: BatchCurve[];
  findings: Finding[];
  search: SearchResult | null;
}

/** What `gpurun tune` has searched. */
interface SearchResult {
  best: string | null;
  own: string | null;
  left_out: { settings: { [key: string]: unknown }; reason: string }[];
  combinations: TriedCombination[];
  finalists: string[];
  /** Than which no other tried one is both as fast and as small, fastest first. */
  front: string[];
  effects: SearchEffect[];
  memory_gib: number | null;
  is_over: boolean;
  summary: string;
}

interface TriedCombination {
  variant: string;
  label: string;
  trials: number;
  step_ms: number | null;
  ms_per_sample: number | null;
  peak_gib: number | null;
  status: 'ok' | 'oom' | 'failed' | 'timeout' | 'hung' | 'too large';
  reason: string | null;
}

interface SearchEffect {
  key: string;
  value: string;
  against: string;
  at_best: TimeChange | null;
  average: TimeChange | null;
}

/** How much longer steps take, in percent. */
interface TimeChange {
  percent: number;
  ci: Interval | null;
}

/** Marks one combination wherever it is drawn; `null` none. */
type Mark = (id: string | null) => void;

interface Noise {
  aa_percent: number | null;
  ci: Interval | null;
}

interface Difference {
  percent: number | null;
  ci: Interval | null;
  verdict: Verdict;
  /** Why it is inconclusive, where that is known; older runs don't say. */
  why?: string | null;
}

interface VariantResult {
  id: string;
  split: number[];
  global_batch: number | null;
  status: VariantStatus;
  reason: string | null;
  log: string | null;
  rounds: number;
  launches: number;
  step_ms: { estimate: number; ci: Interval | null } | null;
  samples_per_s: number | null;
  vs_baseline: Difference | null;
  scaling_efficiency: number | null;
  ranks: RankFigures[];
  balanced: Balanced | null;
  probe: { curves: SizeCurve[] } | null;
  workload: string;
}

interface RankFigures {
  rank: number;
  device: string;
  local_batch: number | null;
  step_ms: number | null;
  phases_ms: { [phase: string]: number };
  peak_gib: number | null;
  span_ms: number | null;
  compute_ms: number | null;
  exposed_transfer_ms: number | null;
  exposed_wait_ms: number | null;
  exposed_memcpy_ms: number | null;
  other_steps_ms: number | null;
  idle_ms: number | null;
  input_ms: number | null;
  exposed_comm_ms: { trace: number | null; ablation: number | null };
}

interface Balanced {
  devices: DeviceCost[];
  optimum_ms: number;
}

type MeasuredPoint = [samples: number, ms: number];

interface DeviceCost {
  device: string;
  alpha_ms: number;
  alpha_ci: Interval | null;
  beta_ms: number;
  beta_ci: Interval | null;
  straight: boolean;
  points: MeasuredPoint[];
  max_samples: number | null;
}

/** A curve of a micro-benchmark as the terminal has it: a name, and a row of texts per point. */
interface CurveTable {
  name: string;
  header: string[];
  rows: string[][];
}

interface CurvePoint {
  size: number;
  time_us: number;
  ci_us: [number, number] | null;
}

interface SizeCurve {
  unit: 'bytes' | 'rows';
  points: CurvePoint[];
}

type ShownCurve = SizeCurve & CurveTable;

interface BatchCurve {
  label: string;
  points: BatchPoint[];
  knee: number | null;
}

/** What is said of batch curves with a knee, and of those without. */
/** What the bars of variants with and without traces are, and the rows of one with many ranks. */
interface BarSentences {
  traced: string;
  /** The same of the bars in the ranking, which are as long as the timed step. */
  ranked: string;
  timed: string;
  ranks: string;
  hidden: string;
  meanings: { [N in PhaseName | TimedPhase]: string };
}

interface KneeSentences {
  some: string;
  none: string;
}

interface BatchPoint {
  variant: string;
  global_batch: number;
  samples_per_s: number;
}

interface StepsAnswer {
  variants: { [id: string]: Steps };
}

interface Steps {
  total: number;
  ranks: number[];
  number: number[];
  round: number[];
  launch: string[];
  step_ms: number[];
  by_rank_ms: number[][];
}

/** What the dots of a variant are drawn from. */
type DrawnSteps = Pick<Steps, 'number' | 'round' | 'step_ms'>;

interface ProgressAnswer {
  version: string;
  status: RunStatus;
  /** The server's conclusion of a run without figures, and what it goes on to say. */
  headline: string | null;
  details: string | null;
  time_s: number;
  stage: Stage | null;
  done: number | null;
  seconds_left: number | null;
  variants: VariantProgress[];
  live: LiveDevice[];
}

interface Stage {
  launch: string;
  stage: string;
  /** What it does now, as the terminal's progress line says it. */
  text: string;
  variant: string | null;
  label: string | null;
  round: number;
  rounds: number;
}

interface VariantProgress {
  id: string;
  label: string;
  status: VariantStatus;
  rounds: number;
  ranks: RankProgress[];
}

interface RankProgress {
  rank: number;
  device: string | null;
  local_batch: number | null;
  steps: number;
  step: number[];
  step_ms: number[];
  forward_ms: number[];
  peak_gib: number | null;
}

interface LiveDevice {
  device: string;
  name: string | null;
  memory_gib: number | null;
  memory_total_gib: number | null;
  utilisation_percent: number | null;
  sm_clock_mhz: number | null;
  sm_clock_max_mhz: number | null;
  power_w: number | null;
  power_limit_w: number | null;
  temperature_c: number | null;
  pids: number[] | null;
}

// ---- Answers that need the index of the traces ----

/** What every such route may answer instead of its own fields. */
type Unready = Indexing | Building | Broken | Untraced;

interface Indexing {
  state: 'indexing';
  problems: Problem[];
  done_bytes: number;
  total_bytes: number;
  seconds_left: number | null;
  version?: undefined;
}

interface Building {
  state: 'building';
  version?: undefined;
}

interface Broken {
  state: 'broken';
  problems: Problem[];
  version?: undefined;
}

interface Untraced {
  state: 'none';
  problems: Problem[];
  version?: undefined;
}

interface Ready {
  state: 'ready';
  problems: Problem[];
  /** The report as a file has none. */
  version?: string;
}

/** The parts of a step in ms; they add up to the span, with `input_ms` a part of idle. */
interface Breakdown {
  span_ms: number;
  compute_ms: number;
  exposed_transfer_ms: number;
  exposed_wait_ms: number;
  exposed_memcpy_ms: number;
  other_steps_ms: number;
  idle_ms: number;
  input_ms: number;
}

interface BreakdownAnswer extends Ready {
  warnings: string[];
  /** Without steps, the figures are those of whole traces. */
  has_steps: boolean;
  mean: Breakdown | null;
  sentence: string;
  parallelism: string[];
  ranks: RankBreakdown[];
}

interface RankBreakdown {
  rank: number;
  device: string;
  typical: Breakdown | null;
  steps: (Breakdown & { step: number })[];
}

type OperatorKind = 'ops' | 'kernels' | 'modules';

interface OperatorsAnswer extends Ready {
  sentence: string;
  details: string;
  kind: OperatorKind;
  ranks: number[];
  slowest_rank: number;
  is_straggler: boolean;
  steps: number;
  step_ms: number;
  step_by_rank_ms: number[];
  rest_ms: number;
  rest_by_rank_ms: number[];
  overlap_ms: number;
  overlap_by_rank_ms: number[];
  against_step_ms: number | null;
  against_rest_ms: number | null;
  against_overlap_ms: number | null;
  rows: OperatorRow[];
}

/** `name` is `null` in the row that sums up what lies beyond the first 1000. */
interface OperatorRow {
  name: string | null;
  named: boolean;
  class: string;
  calls: number | null;
  self_ms: number;
  wait_ms: number;
  host_ms: number;
  share_percent: number;
  by_rank_ms: number[];
  wait_by_rank_ms: number[];
  against_ms: number | null;
  difference_ms: number | null;
}

interface TablesAnswer extends Ready {
  table: string;
  kinds: { key: string; title: string }[];
  sentence: string;
  ranks: number[];
  steps: number[];
  warnings: string[];
  tables: ShownTable[];
  /** Why there is no table, or what the columns mean and what follows. */
  notes: string[];
}

interface ShownTable {
  titles: string[];
  name_title: string;
  rows: ShownRow[];
  curve_title: string;
}

interface ShownRow {
  cells: Cell[];
  name: string;
  depth: number;
  curve: number[];
  is_total: boolean;
}

/** A figure as it is shown, and as a number. */
interface Cell {
  text: string;
  value: number | null;
}

interface MetaAnswer extends Ready {
  warnings: string[];
  base_time_ns: string;
  end_ns: number;
  apart: boolean;
  linked: boolean;
  num_events: number;
  classes: string[];
  ranks: MetaRank[];
  compact: CompactMeta;
  steps: TracedStep[];
}

/** What a row a rank can be coloured and sorted by. */
interface CompactMeta {
  colours: { key: BandKind; title: string; legend: { class: string; label: string }[] }[];
  orders: RankOrder[];
}

/** All ranks from top to bottom. */
interface RankOrder {
  key: string;
  title: string;
  ranks: number[];
  /** What the notes of the ranks are. */
  note_title: string;
  notes: string[];
  begins_group: boolean[];
}

interface MetaRank {
  rank: number;
  label: string;
  device: string | null;
  active_ns: [from: number, to: number];
  lanes: Lane[];
}

type BandKind = 'operation' | 'parallelism';

interface Lane {
  lane: number;
  kind: 'overview' | BandKind | 'thread' | 'stream';
  label: string;
  rows: number;
}

interface TracedStep {
  rank: number;
  step: number;
  start_ns: number;
  end_ns: number;
}

interface WindowAnswer extends Ready {
  from_ns: number;
  to_ns: number;
  width_px: number;
  names: string[];
  labels: string[];
  lanes: LaneBlocks[];
  links: Link[];
  links_left_out: number;
}

/** The blocks of a lane in columns, by row, then start. */
interface LaneBlocks {
  lane: number;
  row: number[];
  start_ns: number[];
  end_ns: number[];
  class: number[];
  name: number[];
  id: number[];
  count: number[];
  busy_ns: number[];
}

type LinkPart = [
  rank: number,
  lane: number,
  row: number,
  id: number,
  start_ns: number,
  transfer_from_ns: number,
  end_ns: number,
];

interface Link {
  collective: number;
  kind: string | null;
  group: string;
  label: string;
  parts: LinkPart[];
}

interface EventAnswer extends Ready {
  id: number;
  name: string;
  class: string;
  rank: number;
  lane: number;
  row: number;
  lane_label: string;
  step: number | null;
  start_ns: number;
  end_ns: number;
  duration_ns: number;
  /** `null` in a report as a file, as is `launches`. */
  self_ns: number | null;
  exposed_ns: number | null;
  launched_by: { id: number; name: string } | null;
  launch_to_start_ns: number | null;
  launches: { count: number; first_id: number | null } | null;
  parent: { id: number; name: string } | null;
  correlation: number | null;
  collective: CollectiveAnswer | null;
}

interface CollectiveAnswer {
  collective: number;
  kind: string | null;
  group: string | null;
  seq: number | null;
  bytes: number | null;
  bus_gb_per_s: number | null;
  last_rank: number | null;
  next: number | null;
  previous: number | null;
  ranks: CollectiveRank[];
}

/** `wait_ns` is `null` where the ranks' parts could not be matched. */
interface CollectiveRank {
  rank: number;
  id: number;
  start_ns: number;
  wait_ns: number | null;
  transfer_ns: number;
}

interface SearchAnswer extends Ready {
  total: number;
  names: { name: string; count: number; total_ns: number }[];
  events: FoundEvent[];
}

interface FoundEvent {
  id: number;
  name: string;
  lane: number;
  row: number;
  start_ns: number;
  end_ns: number;
}

interface SelectionAnswer extends Ready {
  from_ns: number;
  to_ns: number;
  span_ns: number;
  ranks: RankSums[];
  names: NameSum[];
}

interface RankSums {
  rank: number;
  compute_ns?: number;
  transfer_ns?: number;
  wait_ns?: number;
  copy_ns?: number;
  input_ns?: number;
  idle_ns: number;
}

/** A name, and the same without template arguments and parameters, as blocks show it. */
interface Named {
  name: string;
  label: string;
}

interface NameSum extends Named {
  class: string;
  count: number;
  total_ns: number;
}

interface MergedAnswer extends Ready {
  bytes: number;
  file: string;
}

/** The answer of every route. */
interface Routes {
  runs: RunsAnswer;
  run: RunAnswer;
  steps: StepsAnswer;
  progress: ProgressAnswer;
  breakdown: BreakdownAnswer | Unready;
  operators: OperatorsAnswer | Unready;
  tables: TablesAnswer | Unready;
  'timeline/meta': MetaAnswer | Unready;
  'timeline/window': WindowAnswer | Unready;
  'timeline/event': EventAnswer | Unready;
  'timeline/search': SearchAnswer | Unready;
  'timeline/selection': SelectionAnswer | Unready;
  'trace/merged': MergedAnswer | Unready;
}

type TimelineRoute = 'timeline/window' | 'timeline/event' | 'timeline/search' | 'timeline/selection';
type TracedRoute = 'breakdown' | 'operators' | 'tables' | 'timeline/meta' | TimelineRoute | 'trace/merged';
type UnderWay = Indexing | Building;
/** What such a route answers in the end. */
type Final<R extends TracedRoute> = Exclude<Routes[R], UnderWay>;

interface Asked {
  run?: string;
  variant?: string | string[];
  against?: string | undefined;
  kind?: string;
  table?: string;
  step?: string | undefined;
  again?: number;
  prepare?: number;
  id?: number | string;
  collective?: number;
  rank?: number | string | undefined;
  q?: string;
  after_ns?: number;
  from_ns?: number;
  to_ns?: number;
  width_px?: number;
  lanes?: string;
}

/** Where answers come from: the server, or the report as a file. */
interface AnswerSource {
  /** Whether a server is there, that can be asked again. */
  live: boolean;
  /** The views that it has answers for; all if absent. */
  views?: string[];
  get<R extends keyof Routes>(route: R, parameters?: Asked, signal?: AbortSignal): Promise<Routes[R]>;
  ready<R extends TracedRoute>(
    route: R,
    parameters: Asked,
    options?: { signal?: AbortSignal; progress?: (answer: UnderWay) => void },
  ): Promise<Final<R>>;
  url(route: keyof Routes, parameters?: Asked): URL;
  bytes(route: keyof Routes, parameters?: Asked, signal?: AbortSignal): Promise<ArrayBuffer>;
}

/** What a report as a file holds. */
interface ReportData {
  run: RunAnswer;
  steps: { [id: string]: Steps };
  timelines: { [id: string]: StoredAnswers };
}

interface StoredAnswers {
  meta: MetaAnswer;
  window: WindowAnswer;
  breakdown: BreakdownAnswer;
}

// ---- Classes of the modules ----

type App = import('./app.js').App;
type Run = import('./model.js').Run;
type Variant = import('./model.js').Variant;
type State = import('./state.js').State;
type Scale = import('./shared/scale.js').Scale;
type Plot = import('./splits/plot.js').Plot;
type Combination = import('./search/search.js').Combination;
type Timeline = import('./timeline/timeline.js').Timeline;

/** The app once it has a run: what views are given. */
type OpenApp = App & { run: Run };

/** A view in front, as the app knows it. */
interface View {
  /** Whether it stays as it is when the run has new figures, which it takes by `update`. */
  keeps?: boolean;
  update?(): unknown;
  /** Whether it has drawn the change by itself. */
  changed?(changes: Changes): boolean;
  stop?(): void;
}

type Show = (host: HTMLElement, app: OpenApp) => Promise<View | undefined> | View | undefined;

/** What a broken trace's message offers. */
interface Retry {
  live: boolean;
  isTraces: boolean;
  again: () => void;
}

// ---- State and elements ----

/** What the address can hold. */
type StateKey =
  | 'run' | 'tab' | 'variant' | 'against' | 'all' | 'q' | 'sort' | 'brush' | FilterName
  | 'kind' | 'opsort' | 'oprank' | 'table' | 'tablesort' | 'tablerank' | 'step'
  | 'rank' | 'from' | 'to' | 'sel' | 'range' | 'rows' | 'order' | 'colours';
type FilterName = 'strategy' | 'devices' | 'precision';
type Changes = { [K in StateKey]?: string | null };

type Child = Node | string | null | undefined | false | Child[];
type AttributeValue = string | number | boolean | null | undefined;
type Style = { [property: string]: string | number };

/** The attributes that the page uses, so that a misspelt one is found. */
type AttributeName =
  | 'class' | 'id' | 'title' | 'role' | 'tabindex' | 'hidden' | 'type' | 'value' | 'disabled' | 'selected'
  | 'placeholder' | 'spellcheck' | 'autocomplete' | 'href' | 'rel' | 'download' | 'height' | 'width'
  | 'scope' | 'colspan'
  | 'x' | 'y' | 'x1' | 'x2' | 'y1' | 'y2' | 'cx' | 'cy' | 'r' | 'd' | 'viewBox' | 'preserveAspectRatio'
  | 'overflow' | 'stroke-width' | 'text-anchor'
  | `aria-${string}` | `data-${string}`;
type Attributes<E> = { [N in AttributeName]?: AttributeValue } & {
  [N in keyof HTMLElementEventMap as `on${N}`]?: (event: HTMLElementEventMap[N] & { currentTarget: E }) => unknown;
} & { style?: Style };

/** Choices as `[value, text]`. */
type Options = (readonly [value: string, text: string])[];

// ---- Figures as they are drawn ----

type PhaseName = 'compute' | 'transfer' | 'wait' | 'copy' | 'input' | 'other_steps' | 'idle';
/** The parts of a timed step, where there is no trace. */
type TimedPhase = 'input' | 'h2d' | 'forward' | 'backward' | 'optimizer' | 'between_phases';
interface PhaseTime {
  name: PhaseName | TimedPhase;
  ms: number;
}
/** The figures of a traced step, of a rank of the comparison or of a breakdown. */
type TracedFigures = { [F in keyof Breakdown]: number | null };

/** A scale with its ticks' distance. */
interface Axis {
  scale: Scale;
  step: number;
}

type Point = [x: number, y: number];

interface Edges {
  left: number;
  right: number;
  top: number;
  bottom: number;
}

/** A name next to its place. */
interface PlacedName {
  text: string;
  x: number;
  y: number;
  class?: string;
}

/** A line of a line chart. */
interface Series {
  name: string;
  x: number[];
  y: number[];
}

/** A difference as the ranking draws it: of a variant, or between two measurements of the baseline. */
interface DrawnDifference {
  percent: number | null;
  ci: Interval | null;
  verdict: Verdict | 'noise';
  why?: string | null;
}

type Palette = { [name: string]: string };

// ---- The timeline ----

/** A stretch of time, in ns. */
interface Stretch {
  from: number;
  to: number;
}

/** A step over all ranks; on the page it ends where the next one starts. It takes as long as its slowest rank. */
interface MergedStep extends TracedStep {
  longest_ns: number;
  shown_end_ns: number;
}

interface PlacedLane extends Lane {
  rank: number;
  y: number;
  rowPx: number;
  shownRows: number;
  height: number;
  isThread: boolean;
  hasMore: boolean;
  isExpanded: boolean;
  band?: Band;
}

/** What only a row of the compact timeline has. */
interface Band {
  /** What the row's name goes on to say; of a group's rows only the first says it. */
  note: string;
  /** The note as it is shown next to the pointer. */
  whole: string;
  beginsGroup: boolean;
  activeNs: [from: number, to: number];
}

interface PlacedTitle {
  rank: number;
  device: string | null;
  label: string;
  y: number;
}

interface Layout {
  titles: PlacedTitle[];
  lanes: PlacedLane[];
  height: number;
  byLane: Map<number, PlacedLane>;
  /** The rows of a compact timeline, which has no others. */
  byRank: Map<number, PlacedLane> | null;
}

/** How a compact timeline is shown. */
interface Compact {
  order: RankOrder;
  colours: CompactMeta['colours'][number];
}

/** A lane's blocks with, by row, the first one and the end. */
interface IndexedLane extends LaneBlocks {
  rows: Map<number, [first: number, end: number]>;
}

interface IndexedWindow {
  names: string[];
  labels: string[];
  links: Link[];
  lanes: Map<number, IndexedLane>;
  partOf: Map<number, Link>;
}

/** What is asked of `timeline/event`. */
type EventRequest = { id: number | string } | { collective: number; rank: number };

/** What a pointer holds in the overview: the window or one of its ends. */
interface Grip {
  part: 'from' | 'to' | 'all';
  offset: number;
}

/** What mouse, touch and keys can ask for. */
interface Verbs {
  zoom(factor: number, at: number): void;
  pan(share: number): void;
  drag(dx: number, dy: number): void;
  hover(event: PointerEvent): void;
  leave(): void;
  click(event: PointerEvent): void;
  open(event: MouseEvent): void;
  choose(a: number, b: number, isDone: boolean): void;
  fit(): void;
  clear(): void;
  neighbour(way: 'next' | 'previous'): void;
  grip(grip: Grip, ns: number): void;
}

/** The elements of its page. */
interface TimelineParts {
  overviewCanvas: HTMLCanvasElement;
  ruler: HTMLCanvasElement;
  lanesCanvas: HTMLCanvasElement;
  body: HTMLElement;
  spacer: HTMLElement;
  panel: HTMLElement;
  found: HTMLElement;
}

/** What the page of a timeline says about it. */
type TimelineFacts = Pick<Timeline, 'app' | 'variant' | 'steps' | 'meta' | 'endNs'>;

type Context = CanvasRenderingContext2D;
type Fill = (kind: string) => string | CanvasPattern;
/** ns → px. */
type ToPx = (ns: number) => number;

interface Box {
  y: number;
  height: number;
}

/** A block as it is drawn. */
interface Block {
  from: number;
  to: number;
  box: Box;
  kind: string;
  isMerged: boolean;
  name: string;
  label: string;
  data: IndexedLane;
  index: number;
}

/** What lies under the pointer: a lane's name, or its blocks with the index of one, -1 where there is none. */
type Under = { isLabel: true; lane: PlacedLane } | { isLabel: false; lane: PlacedLane; data: IndexedLane | undefined; index: number };
type BlockUnder = { lane: PlacedLane; data: IndexedLane; index: number };

type GoTo = (what: EventRequest) => void;
type Figure = [name: string, value: Child];

/** What a search has found so far; `at` is the selected one. */
interface Hits {
  q: string;
  events: FoundEvent[];
  total: number;
  at: number;
}

// ---- Splits ----

/** A row of the ranking: a variant, or the baseline's second measurement, which has a difference and no more. */
interface Row {
  isNoise: boolean;
  id: string | null;
  label: string;
  difference: DrawnDifference | null;
  stepMs: number | null;
  result: VariantResult | null;
  /** The rank that the others wait for. */
  slowest: RankFigures | null;
  timedParts: PlannedVariant['timed_parts'];
  differenceInterval: string;
  figures: { [metric: string]: MetricFigure };
}

/** What headings of columns are made from. */
interface Ranking {
  drawn: { parts: PhaseTime[] }[];
  run: Run;
  baselineLabel: string;
  fullMs: number;
}

interface Column {
  key: string;
  name: string | ((view: Ranking) => Child);
  /** Whether it takes two variants to have something in it. */
  compares?: boolean;
  sort?: (row: Row) => string | number | null | undefined;
  right?: boolean;
  pad?: boolean;
  className?: string;
}

type Brush = [from: number, to: number];

/** Equal bins from `low` on. */
interface Bins {
  low: number;
  width: number;
  counts: number[];
}

type KnownDifference = DrawnDifference & { percent: number };

/** A device's cost curve as it is drawn. */
interface DeviceCurve {
  index: number;
  device: string;
  /** The most samples that it is drawn to. */
  most: number;
  points: MeasuredPoint[];
  line: MeasuredPoint[];
  chosen: MeasuredPoint | null;
}

// ---- Where time goes ----

/** A variant's bars. */
interface Bars {
  id: string;
  label: string;
  said: string;
  ranks: RankBar[];
  stepMs: number | null;
  isTraced: boolean;
  half: number | null;
  canOpen: boolean;
  /** A bar is all of a trace, which has no steps. */
  isWhole?: boolean;
}

interface RankBar {
  rank: number;
  who: string;
  parts: PhaseTime[];
}

interface BarContext extends Axis {
  app: OpenApp;
  decimals: number;
}

/** A step's dot. */
interface Dot {
  x: number;
  y: number;
  isBeyond: boolean;
}

/** A rank's waits by step, in ms. */
interface RankWaits {
  rank: number;
  device: string;
  waits: number[];
  steps: number[];
  mean: number;
}

// ---- Tables ----

/** A row with those below it. */
interface TreeRow extends ShownRow {
  /** Whether any row of the table is below another. */
  inTree: boolean;
  inner: TreeRow[];
  isOpen: boolean;
  /** The names around it, and its own. */
  path: string;
  /** Whether its name, or one below it, contains this. */
  holds: (q: string) => boolean;
}

interface TableColumn {
  key: string;
  title: string;
  className: string;
  width?: string;
  sort?: (row: TreeRow) => number | string | null;
  cell: (row: TreeRow) => Child;
}

/** How a table is shown, and what to do about a click. */
interface TableLook {
  q: string;
  /** Column and direction; `null`: as the server has it. */
  order: string | null;
  choose: ((order: string) => void) | null;
  /** Paths of the rows that were opened or closed. */
  toggled: Set<string>;
  again: () => void;
}

// ---- Operators and devices ----

interface OperatorColumn {
  key: string;
  head: Child;
  cell: (row: OperatorRow) => Child;
  sort?: (row: OperatorRow) => string | number | null;
  total?: Child;
  right?: boolean;
  pad?: boolean;
  width?: string;
  className?: string;
}

/** A variant's operators, next to those of another. */
interface Compared {
  answer: OperatorsAnswer;
  variant: Variant;
  against: Variant | null;
}

/** What a device's live figures are drawn of. */
type Gauge = 'memory_gib' | 'utilisation_percent' | 'sm_clock_mhz' | 'power_w';
