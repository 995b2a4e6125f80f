"""The queue's Lua scripts. Redis runs each of them atomically.

Keys below the prefix P: `queue:CLIENT` waiting job keys, one list for each client; `ring` owners with waiting jobs,
served in turn; `ring:OWNER` their clients, likewise (CLIENT is OWNER~NAME, where the client chooses only the name);
`queued` number of waiting jobs; `shares` owner -> number of its waiting jobs; `jobs` key -> payload; `owner` (a worker),
`tries` of leased jobs; `taken:WORKER` jobs leased to a worker; `alive:WORKER` its heartbeat; `workers` all workers;
`waiters` key -> reply lists; `replies:SERVER` answers; `done:KEY` kept answers; `bell` list that wakes an idle worker.
Sessions: `sessions` name -> worker; `held:WORKER` its sessions; `unknown:WORKER` those of them that it did not know of;
calls of an open session wait in `pinned:WORKER` (`bell:WORKER` wakes that worker), calls that open a session in
`squeue:CLIENT`, `sring`, `sring:OWNER`, `sbell`.
A job key is CLIENT/k... (its answer is kept for a retry) or CLIENT/u... (not kept). It ends in `@NAME` for a call of
a session, in `=NAME` when that session must be open already.
"""

# What the scripts share.
_LIBRARY = """
local function is_alive(P, worker) return redis.call('EXISTS', P..'alive:'..worker) == 1 end

-- Whether a job waits: a key may be in a queue without a job (it was withdrawn), or twice (and was then submitted again).
local function waits(P, key)
  return redis.call('HEXISTS', P..'jobs', key) == 1 and redis.call('HEXISTS', P..'owner', key) == 0
end

-- Adds `n` to the number of waiting jobs, of all and of the owner of `key`.
local function count(P, key, n)
  local owner = string.match(key, '^[^~/]*')
  if redis.call('INCRBY', P..'queued', n) < 0 then redis.call('SET', P..'queued', '0') end
  if redis.call('HINCRBY', P..'shares', owner, n) <= 0 then redis.call('HDEL', P..'shares', owner) end
end

local function wake(bell)
  if redis.call('LLEN', bell) == 0 then redis.call('RPUSH', bell, '1') end
end

-- Puts a job into its queue: RPUSH for a new job, LPUSH for a requeued one. False when its session is open nowhere.
local function place(P, key, push)
  local client = string.match(key, '^(.-)/')
  local sort, session = string.match(key, '([@=])([^@=]+)$')
  local holder = session and redis.call('HGET', P..'sessions', session)
  if holder and is_alive(P, holder) then
    redis.call(push, P..'pinned:'..holder, key)
    wake(P..'bell:'..holder)
  elseif sort == '=' then
    return false
  else
    local s = session and 's' or ''
    local owner = string.match(client, '^[^~]*')
    if redis.call(push, P..s..'queue:'..client, key) == 1 and redis.call('RPUSH', P..s..'ring:'..owner, client) == 1 then
      redis.call('RPUSH', P..s..'ring', owner)
    end
    wake(P..s..'bell')
  end
  count(P, key, 1)
  return true
end

-- Wakes an idle worker when jobs wait that any worker may lease.
local function ring(P)
  for _, s in ipairs({'', 's'}) do
    if redis.call('LLEN', P..s..'ring') > 0 then wake(P..s..'bell') end
  end
end

local function reply(P, list, key, answer)
  redis.call('RPUSH', P..'replies:'..list, key..'\\n'..answer)
  redis.call('EXPIRE', P..'replies:'..list, 60)
end

local function forget(P, key)
  for _, name in ipairs({'jobs', 'owner', 'tries', 'waiters'}) do redis.call('HDEL', P..name, key) end
end

-- Ends a job: everyone who waits for it gets `answer`.
local function settle(P, key, answer)
  local waiting = redis.call('HGET', P..'waiters', key)
  forget(P, key)
  for list in string.gmatch(waiting or '', '%S+') do reply(P, list, key, answer) end
end

-- Ends a worker's lease of a job. False when the job was not leased to it.
local function take_back(P, worker, key)
  redis.call('SREM', P..'taken:'..worker, key)
  return redis.call('HGET', P..'owner', key) == worker and redis.call('HDEL', P..'owner', key)
end

local function forget_session(P, worker, session)
  redis.call('SREM', P..'held:'..worker, session)
  if redis.call('HGET', P..'sessions', session) == worker then redis.call('HDEL', P..'sessions', session) end
end
"""

# ARGV: prefix.
RING = "ring(ARGV[1]) return 1"

# ARGV: prefix, reply list, largest number of waiting jobs, then key and payload of each job.
# Returns the number of waiting jobs, or -1 when the new ones do not fit: an owner may have as many waiting jobs as there
# would be room for others, so one alone takes half of the queue and leaves half.
ENQUEUE = """
local P, list, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
local queued = tonumber(redis.call('GET', P..'queued') or '0')
local room, shares = most - queued - (#ARGV - 3) / 2, {}
for i = 4, #ARGV, 2 do
  local owner = string.match(ARGV[i], '^[^~/]*')
  shares[owner] = (shares[owner] or tonumber(redis.call('HGET', P..'shares', owner) or '0')) + 1
  if shares[owner] > room then return -1 end
end
for i = 4, #ARGV, 2 do
  local key, payload = ARGV[i], ARGV[i + 1]
  local answer = string.match(key, '/(.)') == 'k' and redis.call('GET', P..'done:'..key)
  if answer then
    reply(P, list, key, answer)
  else
    local waiting = redis.call('HGET', P..'waiters', key)
    if not waiting then
      redis.call('HSET', P..'waiters', key, list)
    elseif not string.find(' '..waiting..' ', ' '..list..' ', 1, true) then
      redis.call('HSET', P..'waiters', key, waiting..' '..list)
    end
    if redis.call('HSETNX', P..'jobs', key, payload) == 1 and not place(P, key, 'RPUSH') then
      settle(P, key, '!lost')
    end
  end
end
return tonumber(redis.call('GET', P..'queued') or '0')
"""

# ARGV: prefix, worker, number of jobs to lease, number of sessions it may open, seconds to keep an answer, number of jobs
# leased before, then key and answer of each finished job. An answer from a worker that no longer owns the job is dropped.
# Returns key and payload of each leased job. On odd turns a stateless call goes first, of another client each time; on even
# ones a call of an open session, then one that opens a session: were these first, all sessions would be opened before any
# has ended. Every 16th turn serves them first all the same.
EXCHANGE = """
local P, worker, n, room, keep = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local before = tonumber(ARGV[6])
for i = 7, #ARGV, 2 do
  local key, answer = ARGV[i], ARGV[i + 1]
  if take_back(P, worker, key) then
    settle(P, key, answer)
    -- a client that was told to come back must not find this answer again
    local is_final = not string.find(answer, '"outcome": "queue_timeout"', 1, true)
    if string.match(key, '/(.)') == 'k' and is_final then redis.call('SET', P..'done:'..key, answer, 'EX', keep) end
  end
end
local out = {}
-- Leases a job, if it waits. Returns its key: there was one.
local function lease(key)
  if key and waits(P, key) then
    count(P, key, -1)
    redis.call('HSET', P..'owner', key, worker)
    redis.call('SADD', P..'taken:'..worker, key)
    redis.call('HINCRBY', P..'tries', key, 1)
    out[#out + 1] = key
    out[#out + 1] = redis.call('HGET', P..'jobs', key)
  end
  return key
end
local function turn(s)
  local owner = redis.call('LPOP', P..s..'ring')
  if not owner then return nil end
  local clients = P..s..'ring:'..owner
  local client = redis.call('LPOP', clients)
  local key = redis.call('LPOP', P..s..'queue:'..client)
  if redis.call('LLEN', P..s..'queue:'..client) > 0 then redis.call('RPUSH', clients, client) end
  if redis.call('LLEN', clients) > 0 then redis.call('RPUSH', P..s..'ring', owner) end
  return key
end
local function plain() return lease(turn('')) end
local function pinned() return lease(redis.call('LPOP', P..'pinned:'..worker)) end
local function opening()
  local key = room > 0 and turn('s')
  if not key or not waits(P, key) then return key end
  local session = string.match(key, '@([^@=]+)$')
  local holder = redis.call('HGET', P..'sessions', session)
  if holder and holder ~= worker and is_alive(P, holder) then
    count(P, key, -1)
    place(P, key, 'RPUSH')
    return key
  end
  if holder ~= worker then room = room - 1 end
  redis.call('HSET', P..'sessions', session, worker)
  redis.call('SADD', P..'held:'..worker, session)
  return lease(key)
end
local more = true
while #out < n * 2 and more do
  local number = before + #out / 2
  if number % 2 == 1 then
    more = plain() or pinned() or opening()
  elseif number % 16 == 0 then
    more = opening() or pinned() or plain()
  else
    more = pinned() or opening() or plain()
  end
end
ring(P)
if redis.call('LLEN', P..'pinned:'..worker) > 0 then wake(P..'bell:'..worker) end
return out
"""

# ARGV: prefix, worker, keys of the jobs it holds. Its other leased jobs never arrived and are requeued.
RECLAIM = """
local P, worker = ARGV[1], ARGV[2]
local held = {}
for i = 3, #ARGV do held[ARGV[i]] = true end
local again = 0
for _, key in ipairs(redis.call('SMEMBERS', P..'taken:'..worker)) do
  if not held[key] and take_back(P, worker, key) then
    redis.call('HINCRBY', P..'tries', key, -1)
    if redis.call('HEXISTS', P..'jobs', key) == 1 and place(P, key, 'LPUSH') then again = again + 1 end
  end
end
return again
"""

# ARGV: prefix, then job keys. Removes jobs that no worker has leased; returns 1 for each of them.
WITHDRAW = """
local P = ARGV[1]
local out = {}
for i = 2, #ARGV do
  local is_waiting = waits(P, ARGV[i])
  out[i - 1] = is_waiting and 1 or 0
  if is_waiting then
    count(P, ARGV[i], -1)
    forget(P, ARGV[i])
  end
end
return out
"""

# ARGV: prefix, then key of each job that nobody waits for any more. Its worker is told to end it. A session's call runs
# to its end, because a retry under the same id must find its answer and not run it twice.
CANCEL = """
local P = ARGV[1]
for i = 2, #ARGV do
  local key = ARGV[i]
  if waits(P, key) then count(P, key, -1) end
  local owner = redis.call('HGET', P..'owner', key)
  if owner and string.find(key, '[@=]') then
    redis.call('HDEL', P..'waiters', key)
  else
    forget(P, key)
    if owner then redis.call('PUBLISH', P..'cancel:'..owner, key) end
  end
end
return 1
"""

# ARGV: prefix, worker, seconds until it counts as dead, its information, its sessions (open or about to be). Repairs what
# Redis knows of them: after a restart it may lack its last second. Returns the sessions that another live worker has opened
# meanwhile. A session of which only Redis knows is forgotten at the second heartbeat in a row: at the first, the call that
# opens it may be on its way to the worker.
HEARTBEAT = """
local P, worker, own, unknown, elsewhere = ARGV[1], ARGV[2], {}, {}, {}
redis.call('SET', P..'alive:'..worker, ARGV[4], 'EX', ARGV[3])
redis.call('SADD', P..'workers', worker)
for i = 5, #ARGV do
  local session = ARGV[i]
  local holder = redis.call('HGET', P..'sessions', session)
  own[session] = true
  if holder and holder ~= worker and is_alive(P, holder) then
    elsewhere[#elsewhere + 1] = session
  elseif holder ~= worker then
    redis.call('HSET', P..'sessions', session, worker)
    redis.call('SADD', P..'held:'..worker, session)
  end
end
for _, session in ipairs(redis.call('SMEMBERS', P..'unknown:'..worker)) do unknown[session] = true end
redis.call('DEL', P..'unknown:'..worker)
for _, session in ipairs(redis.call('SMEMBERS', P..'held:'..worker)) do
  if unknown[session] and not own[session] then
    forget_session(P, worker, session)
  elseif not own[session] then
    redis.call('SADD', P..'unknown:'..worker, session)
  end
end
return elsewhere
"""

# ARGV: prefix, worker, its sessions that have ended.
FORGET_SESSIONS = """
for i = 3, #ARGV do forget_session(ARGV[1], ARGV[2], ARGV[i]) end
return 1
"""

# ARGV: prefix, largest number of tries. Jobs of dead workers go back to the head of their queue, or fail: as poison after
# their last try, as lost with their session. Returns {jobs requeued, jobs failed}.
REAP = """
local P, most = ARGV[1], tonumber(ARGV[2])
local back, failed = 0, 0
local function again(key, tries)
  local has_tries = tries < most
  if redis.call('HEXISTS', P..'jobs', key) == 0 then
    return
  elseif has_tries and place(P, key, 'LPUSH') then
    back = back + 1
  else
    failed = failed + 1
    settle(P, key, has_tries and '!lost' or '!poison')
  end
end
for _, worker in ipairs(redis.call('SMEMBERS', P..'workers')) do
  if not is_alive(P, worker) then
    for _, session in ipairs(redis.call('SMEMBERS', P..'held:'..worker)) do forget_session(P, worker, session) end
    for _, key in ipairs(redis.call('LRANGE', P..'pinned:'..worker, 0, -1)) do
      if waits(P, key) then count(P, key, -1) end
      again(key, 0)
    end
    for _, key in ipairs(redis.call('SMEMBERS', P..'taken:'..worker)) do
      if take_back(P, worker, key) then again(key, tonumber(redis.call('HGET', P..'tries', key) or '0')) end
    end
    for _, name in ipairs({'taken:', 'held:', 'unknown:', 'pinned:', 'bell:'}) do redis.call('DEL', P..name..worker) end
    redis.call('SREM', P..'workers', worker)
  end
end
return {back, failed}
"""

# ARGV: prefix, then job keys. Returns those of no job.
UNKNOWN = """
local missing = {}
for i = 2, #ARGV do
  if redis.call('HEXISTS', ARGV[1]..'jobs', ARGV[i]) == 0 then missing[#missing + 1] = ARGV[i] end
end
return missing
"""

_SCRIPTS = {name: text for name, text in globals().items() if name.isupper() and not name.startswith("_")}
ALL = {name: _LIBRARY + text for name, text in _SCRIPTS.items()}
