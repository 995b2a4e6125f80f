"""The queue's Lua scripts: each one is a step that happens whole or not at all.

Keys below the prefix P: `queue:CLIENT` job keys waiting, one list a client; `ring` clients with waiting jobs,
served in turn; `queued` how many wait; `jobs` key -> payload; `owner`, `tries` of jobs taken; `taken:WORKER`
what a worker holds; `alive:WORKER` its heartbeat; `workers` all of them; `waiters` key -> reply lists;
`replies:SERVER` answers; `done:KEY` kept answers; `bell` wakes an idle worker.
A job key reads CLIENT/k... (answer kept for a later retry) or CLIENT/u... (not kept).
"""

# ARGV: prefix, reply list, most jobs that may wait, then key and payload of each job.
# Returns the number of jobs now waiting, or -1 when they do not fit.
ENQUEUE = """
local P, reply, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
local queued = tonumber(redis.call('GET', P..'queued') or '0')
if queued + (#ARGV - 3) / 2 > most then return -1 end
for i = 4, #ARGV, 2 do
  local key, payload = ARGV[i], ARGV[i + 1]
  local client, kept = string.match(key, '^(.-)/(.)')
  local answer = kept == 'k' and redis.call('GET', P..'done:'..key)
  if answer then
    redis.call('RPUSH', P..'replies:'..reply, key..'\\n'..answer)
    redis.call('EXPIRE', P..'replies:'..reply, 60)
  else
    if redis.call('HSETNX', P..'jobs', key, payload) == 1 then
      if redis.call('RPUSH', P..'queue:'..client, key) == 1 then redis.call('RPUSH', P..'ring', client) end
      queued = redis.call('INCR', P..'queued')
    end
    local waiting = redis.call('HGET', P..'waiters', key)
    if not waiting then
      redis.call('HSET', P..'waiters', key, reply)
    elseif not string.find(' '..waiting..' ', ' '..reply..' ', 1, true) then
      redis.call('HSET', P..'waiters', key, waiting..' '..reply)
    end
  end
end
if queued > 0 and redis.call('LLEN', P..'bell') == 0 then redis.call('RPUSH', P..'bell', '1') end
return queued
"""

# ARGV: prefix, worker, how many. Returns key, payload, tries of each job, in fair turns between clients.
TAKE = """
local P, worker, n = ARGV[1], ARGV[2], tonumber(ARGV[3])
local out = {}
while #out < n * 3 do
  local client = redis.call('LPOP', P..'ring')
  if not client then break end
  local key = redis.call('LPOP', P..'queue:'..client)
  if key then
    if redis.call('DECR', P..'queued') < 0 then redis.call('SET', P..'queued', '0') end
    if redis.call('LLEN', P..'queue:'..client) > 0 then redis.call('RPUSH', P..'ring', client) end
    local payload = redis.call('HGET', P..'jobs', key)
    if payload then
      redis.call('HSET', P..'owner', key, worker)
      redis.call('SADD', P..'taken:'..worker, key)
      out[#out + 1] = key
      out[#out + 1] = payload
      out[#out + 1] = redis.call('HINCRBY', P..'tries', key, 1)
    end
  end
end
if redis.call('LLEN', P..'ring') > 0 and redis.call('LLEN', P..'bell') == 0 then
  redis.call('RPUSH', P..'bell', '1')
end
return out
"""

# ARGV: prefix, worker, seconds an answer is kept, then key and answer of each job.
# An answer from a worker that no longer holds the job is dropped.
FINISH = """
local P, worker, keep = ARGV[1], ARGV[2], ARGV[3]
local accepted = 0
for i = 4, #ARGV, 2 do
  local key, answer = ARGV[i], ARGV[i + 1]
  redis.call('SREM', P..'taken:'..worker, key)
  if redis.call('HGET', P..'owner', key) == worker then
    accepted = accepted + 1
    redis.call('HDEL', P..'jobs', key)
    redis.call('HDEL', P..'owner', key)
    redis.call('HDEL', P..'tries', key)
    local waiting = redis.call('HGET', P..'waiters', key)
    redis.call('HDEL', P..'waiters', key)
    for reply in string.gmatch(waiting or '', '%S+') do
      redis.call('RPUSH', P..'replies:'..reply, key..'\\n'..answer)
      redis.call('EXPIRE', P..'replies:'..reply, 60)
    end
    if string.match(key, '/(.)') == 'k' then redis.call('SET', P..'done:'..key, answer, 'EX', keep) end
  end
end
return accepted
"""

# ARGV: prefix, then job keys. Takes back jobs that have not started; returns 1 for each of those.
WITHDRAW = """
local P = ARGV[1]
local out = {}
for i = 2, #ARGV do
  local key = ARGV[i]
  if redis.call('HEXISTS', P..'owner', key) == 1 then
    out[#out + 1] = 0
  else
    redis.call('HDEL', P..'waiters', key)
    redis.call('HDEL', P..'tries', key)
    out[#out + 1] = redis.call('HDEL', P..'jobs', key)
  end
end
return out
"""

# ARGV: prefix, then key of each job nobody waits for any more. A worker that runs one is told.
CANCEL = """
local P = ARGV[1]
for i = 2, #ARGV do
  local key = ARGV[i]
  local owner = redis.call('HGET', P..'owner', key)
  redis.call('HDEL', P..'waiters', key)
  redis.call('HDEL', P..'jobs', key)
  redis.call('HDEL', P..'tries', key)
  if owner then
    redis.call('HDEL', P..'owner', key)
    redis.call('PUBLISH', P..'cancel:'..owner, key)
  end
end
return 1
"""

# ARGV: prefix, worker, seconds of life. The worker is alive and known.
HEARTBEAT = """
local P, worker = ARGV[1], ARGV[2]
redis.call('SET', P..'alive:'..worker, ARGV[4], 'EX', ARGV[3])
redis.call('SADD', P..'workers', worker)
return 1
"""

# ARGV: prefix, most tries. Jobs of dead workers go back to the head of their queue, or fail as poison.
# Returns {jobs put back, jobs failed}.
REAP = """
local P, most = ARGV[1], tonumber(ARGV[2])
local back, failed = 0, 0
for _, worker in ipairs(redis.call('SMEMBERS', P..'workers')) do
  if redis.call('EXISTS', P..'alive:'..worker) == 0 then
    for _, key in ipairs(redis.call('SMEMBERS', P..'taken:'..worker)) do
      if redis.call('HGET', P..'owner', key) == worker then
        redis.call('HDEL', P..'owner', key)
        if tonumber(redis.call('HGET', P..'tries', key) or '0') >= most then
          failed = failed + 1
          redis.call('HDEL', P..'jobs', key)
          redis.call('HDEL', P..'tries', key)
          local waiting = redis.call('HGET', P..'waiters', key)
          redis.call('HDEL', P..'waiters', key)
          for reply in string.gmatch(waiting or '', '%S+') do
            redis.call('RPUSH', P..'replies:'..reply, key..'\\n!poison')
            redis.call('EXPIRE', P..'replies:'..reply, 60)
          end
        elseif redis.call('HEXISTS', P..'jobs', key) == 1 then
          back = back + 1
          local client = string.match(key, '^(.-)/')
          if redis.call('LPUSH', P..'queue:'..client, key) == 1 then
            redis.call('RPUSH', P..'ring', client)
          end
          redis.call('INCR', P..'queued')
        end
      end
    end
    redis.call('DEL', P..'taken:'..worker)
    redis.call('SREM', P..'workers', worker)
  end
end
if redis.call('LLEN', P..'ring') > 0 and redis.call('LLEN', P..'bell') == 0 then
  redis.call('RPUSH', P..'bell', '1')
end
return {back, failed}
"""
